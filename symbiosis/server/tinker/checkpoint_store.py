"""Checkpoints on the disk: of each run a folder, and in it, by kind and name, folders with PEFT's files and what else is known of each."""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from symbiosis.server.tinker.tinker_messages import LoraSettings, TinkerRefusal, WithMetadata

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}  # by what paths call them
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")
RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
PRIVATE = "tinker/"  # with which the names of adapters begin that no route takes
FACTS, RUN_FACTS = "checkpoint.json", "run.json"
NOTHING = msgspec.Raw(b"null")
SHORTEST_TTL, LONGEST_TTL = 3600, 10 * 366 * 86400


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run that may have ended long ago."""

    tenant: str
    base_model: str
    lora: LoraSettings
    created: float
    user_metadata: msgspec.Raw = NOTHING
    fingerprint: str = ""  # of the base

    @property
    def in_memory(self) -> "RunFacts":
        """What is kept of a run that goes on: its metadata are on the disk only."""
        return msgspec.structs.replace(self, user_metadata=NOTHING)


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    time: float
    expires: float | None = None
    public: bool = False
    user_metadata: msgspec.Raw = NOTHING
    number: int | None = None  # of the request that saved it: done again after a crash, it writes the same one


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One that is there."""

    run_id: str
    id: str  # KIND/NAME
    folder: Path
    run: RunFacts
    facts: CheckpointFacts

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.id}"

    @property
    def adapter(self) -> str:
        """The name by which engines know what it holds. Another one that is put in its place, be it by another server, has another name."""
        return private_name(self.run.tenant, f"{self.path} {self.facts.time}")

    def told(self) -> dict[str, Any]:
        """Return what the API tells of it."""
        size = sum(file.stat().st_size for file in self.folder.iterdir() if file.name != FACTS)
        told: dict[str, Any] = {
            "checkpoint_id": self.id, "checkpoint_type": KINDS[self.id.partition("/")[0]], "time": moment(self.facts.time),
            "tinker_path": self.path, "size_bytes": size, "public": self.facts.public, "user_metadata": self.facts.user_metadata,
        }  # fmt: skip
        return told | ({"expires_at": moment(self.facts.expires)} if self.facts.expires else {})


def metadata(asked: WithMetadata) -> msgspec.Raw:
    """Return what a client tells of what it begins or saves, as JSON.

    >>> msgspec.json.encode({"user_metadata": metadata(WithMetadata(metadata=b'{"a":1}'))})
    b'{"user_metadata":{"a":1}}'
    """
    return msgspec.Raw(asked.metadata) if asked.metadata else NOTHING


def moment(seconds: float) -> str:
    """Return a time as the API tells it.

    >>> moment(0)
    '1970-01-01T00:00:00Z'
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def private_name(tenant: str, path: str) -> str:
    """Return the name by which the engine knows an adapter that is one tenant's alone. Who does not know the tenant cannot make it, and no
    route takes it: `tinker://` paths and runs are asked for by their own names.

    >>> private_name("anna", "tinker://a") == private_name("anna", "tinker://a") != private_name("bob", "tinker://a")
    True
    """
    digest = sha256(b"%d %b %b" % (len(tenant), tenant.encode(), path.encode()))
    return f"{PRIVATE}{digest.hexdigest()[:40]}"


class CheckpointStore:
    """The checkpoints of all runs. A tenant sees its own, and those that others have published."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder, self._clock = folder, clock
        self._lock = threading.Lock()

    def begin_run(self, run_id: str, facts: RunFacts) -> None:
        self._of_run(run_id).mkdir(parents=True, exist_ok=True)
        write_facts(self._of_run(run_id) / RUN_FACTS, facts)

    def end_run(self, run_id: str) -> None:
        """Forget a run that has left no checkpoint."""
        if next(self._all(run_id), None) is None:
            shutil.rmtree(self._of_run(run_id), ignore_errors=True)

    def folders(self, tenant: str) -> list[Path]:
        """Return the folders of a tenant's runs."""
        return [self._of_run(id) for id, _ in self.runs(tenant)]

    def run(self, run_id: str, tenant: str) -> RunFacts:
        """Return what is known of a run. Raises `TinkerRefusal` if there is none that is this tenant's."""
        facts = self.facts_of(run_id)
        if facts is None or facts.tenant != tenant:
            raise TinkerRefusal(f"there is no training run {run_id[:80]!r}", 404)
        return facts

    def runs(self, tenant: str) -> list[tuple[str, RunFacts]]:
        """Return a tenant's runs, the newest first."""
        names = [each.name.replace(".", ":") for each in self.folder.iterdir()] if self.folder.is_dir() else []
        found = [
            (name, facts) for name in names if (facts := self.facts_of(name)) is not None and facts.tenant == tenant
        ]
        return sorted(found, key=lambda each: -each[1].created)

    def find(self, path: str, tenant: str, own: bool = False) -> StoredCheckpoint:
        """Return the checkpoint of a path. Raises `TinkerRefusal` if there is none that this tenant may read, or, with `own`, change."""
        run_id, _, id = path.removeprefix("tinker://").partition("/")
        for found in self._checkpoints(run_id):
            if found.id == id and (found.run.tenant == tenant or (found.facts.public and not own)):
                return found
        raise TinkerRefusal(f"there is no checkpoint {path[:200]!r}", 404)

    def of_run(self, run_id: str, tenant: str) -> list[StoredCheckpoint]:
        self.run(run_id, tenant)
        return sorted(self._checkpoints(run_id), key=lambda each: -each.facts.time)

    def of_tenant(self, tenant: str) -> list[StoredCheckpoint]:
        found = [each for run_id, _ in self.runs(tenant) for each in self._checkpoints(run_id)]
        return sorted(found, key=lambda each: -each.facts.time)

    def place(self, run_id: str, kind: str, name: str, number: int, overwrite: bool = False) -> Path:
        """Return where a new checkpoint goes. Raises `TinkerRefusal` for a name that cannot be one, or that another has."""
        if not NAME.fullmatch(name):
            raise TinkerRefusal(
                f"a checkpoint cannot be named {name[:200]!r}: names have letters, digits and . _ - = +, and at most 128 of them"
            )
        target = self._of_run(run_id) / kind / name
        facts = read_facts(target / FACTS, CheckpointFacts)
        if target.exists() and not overwrite and (facts is None or facts.number != number):
            raise TinkerRefusal(f"tinker://{run_id}/{kind}/{name} is there already: choose another name")
        return target

    def put(
        self,
        target: Path,
        write: Callable[[Path], object],
        number: int,
        ttl: int | None,
        metadata: msgspec.Raw,
    ) -> None:
        """Have a checkpoint written, and put it in its place as a whole."""
        check_ttl(ttl)
        now = self._clock()
        part, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(part)
            write_facts(
                part / FACTS,
                CheckpointFacts(
                    time=now, expires=None if ttl is None else now + ttl, user_metadata=metadata, number=number
                ),
            )
            with self._lock:
                if target.exists():
                    target.rename(old)
                part.rename(target)
        finally:
            for left in (part, old):
                shutil.rmtree(left, ignore_errors=True)

    def change(self, found: StoredCheckpoint, **facts: Any) -> None:
        write_facts(found.folder / FACTS, msgspec.structs.replace(found.facts, **facts))

    def expiry(self, ttl: int) -> float | None:
        """Return when what is kept so long from now on expires; 0 is for ever."""
        check_ttl(ttl or None)
        return self._clock() + ttl if ttl else None

    def delete(self, found: StoredCheckpoint) -> None:
        with self._lock:
            gone = found.folder.with_name(f".{found.folder.name}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            with suppress(FileNotFoundError):  # another server that shares the folder was quicker
                found.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def delete_expired(self) -> list[StoredCheckpoint]:
        """Delete what has outlived its time, and return it."""
        if not self.folder.is_dir():
            return []
        now, gone = self._clock(), list[StoredCheckpoint]()
        for each in self.folder.iterdir():
            gone += [
                found
                for found in self._all(each.name.replace(".", ":"))
                if found.facts.expires and found.facts.expires <= now
            ]
        for found in gone:
            self.delete(found)
        return gone

    def _checkpoints(self, run_id: str) -> Iterator[StoredCheckpoint]:
        now = self._clock()
        return (each for each in self._all(run_id) if not each.facts.expires or each.facts.expires > now)

    def _all(self, run_id: str) -> Iterator[StoredCheckpoint]:
        if (run := self.facts_of(run_id)) is None:
            return
        for kind in KINDS:
            within = self._of_run(run_id) / kind
            for folder in within.iterdir() if within.is_dir() else ():
                if (facts := read_facts(folder / FACTS, CheckpointFacts)) is not None and NAME.fullmatch(folder.name):
                    yield StoredCheckpoint(
                        run_id=run_id, id=f"{kind}/{folder.name}", folder=folder, run=run, facts=facts
                    )

    def facts_of(self, run_id: str) -> RunFacts | None:
        """Return what is known of a run, whoever's it is."""
        return read_facts(self._of_run(run_id) / RUN_FACTS, RunFacts) if RUN.fullmatch(run_id) else None

    def _of_run(self, run_id: str) -> Path:
        return self.folder / run_id.replace(":", ".")


def write_adapter(weights: Any, folder: Path) -> None:
    """Write an adapter (`AdapterWeights`) as PEFT saves it."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(weights.tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(weights.config), indent=2))


def check_ttl(ttl: int | None) -> None:
    if ttl is not None and not SHORTEST_TTL <= ttl <= LONGEST_TTL:
        raise TinkerRefusal(f"ttl_seconds is from {SHORTEST_TTL} to {LONGEST_TTL}, or none, and not {ttl}")


def write_facts(file: Path, facts: msgspec.Struct) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    part.write_bytes(msgspec.json.encode(facts))
    part.replace(file)


def read_facts(file: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
