"""What Tinker's clients sample from: the base, checkpoints, and what a run was when it was asked for a sampler. They are on disk, so a server that is
started again has the same ones."""

import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from symbiosis.errors import NoAdapterMemory, UnknownAdapter
from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker.checkpoint_store import (
    CheckpointStore,
    StoredCheckpoint,
    private_name,
    read_facts,
    write_adapter,
    write_facts,
)
from symbiosis.server.tinker.tinker_messages import TinkerRefusal
from symbiosis.server.tinker.tinker_sessions import TinkerSession, TinkerSessions
from symbiosis.serving import Engine
from symbiosis.serving.lora.adapter_files import read_adapter
from symbiosis.serving.lora.publish import adapter_of, trained_in, weights_of
from symbiosis.training import Run

SAMPLERS = 16_384  # of one tenant, at a time
SNAPSHOTS = 16  # of one run, that can be sampled from without a name
LOADED = 512  # adapters in memory; others are read again
SUFFIX = ".sampler.json"


class Sampler(msgspec.Struct, frozen=True, kw_only=True):
    """One sampler.

    Args:
        path: Of a checkpoint, which is read when it is wanted.
        run: Whose adapter it has: as it was (snapshot), or as it was when such a sampler was asked for last (inflight).
        number: Of the run's request.
    """

    id: str
    tenant: str
    base_model: str
    path: str | None = None
    run: str | None = None
    kind: Literal["", "snapshot", "inflight"] = ""
    number: int = 0

    @property
    def place(self) -> str:
        """Where its adapter is, within the folder of the session."""
        return f"{str(self.run).rpartition(':')[2]}.{self.number}"


class Samplers:
    """The samplers of all tenants."""

    def __init__(self, engine: Engine, checkpoints: CheckpointStore, sessions: TinkerSessions, model: str) -> None:
        self._engine, self._checkpoints, self._sessions, self._model = engine, checkpoints, sessions, model
        self._loaded: OrderedDict[str, None] = OrderedDict()  # adapters of the engine, the one used last comes last
        self._loading = threading.RLock()
        self._lock = threading.Lock()
        self._samplers: dict[str, Sampler] = {}
        for session in sessions:
            found = [read_facts(file, Sampler) for file in session.folder.glob(f"*{SUFFIX}")]
            self._samplers |= {each.id: each for each in sorted(filter(None, found), key=lambda each: each.number)}

    def create(self, tenant: str, asked: m.CreateSampler) -> Any:
        session = self._sessions.of(tenant, asked.session_id)
        if asked.model_path is not None:
            self._load_checkpoint(self._checkpoints.find(asked.model_path, tenant))
        else:
            self.check_base(asked.base_model or "")
        id = f"{session.id}:sample:{asked.sampling_session_seq_id}"
        self._add(session, Sampler(id=id, tenant=tenant, base_model=self._model, path=asked.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": id}

    def get(self, tenant: str, asked: m.GetSampler) -> Any:
        sampler = self._of(tenant, asked.sampler_id)
        return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.path}

    def of_session(self, session: TinkerSession) -> list[str]:
        return [each.id for each in self._samplers.values() if each.id.startswith(f"{session.id}:")]

    def publish(self, run: Run, sampler: Sampler) -> int:
        """Have a sampler of a run as it is now, and return the version. To be called in the run's turn."""
        session = self._sessions.of(sampler.tenant, sampler.id.partition(":")[0])
        write_whole(session.folder / sampler.place, lambda folder: save_adapter(run, self._model, folder))
        version = self.publish_as(self._name(sampler), run.model)
        before = self._of_run(sampler)
        self._add(session, sampler)
        if sampler.kind == "inflight":
            for old in before:
                shutil.rmtree(session.folder / old.place, ignore_errors=True)
            return version
        for old in self._of_run(sampler)[:-SNAPSHOTS]:
            self._drop(session, old)
        return version

    def publish_as(self, adapter: str, model: Any) -> int:
        return self._with_room(adapter, lambda: self._engine.publish(adapter, model))

    def adapter(self, tenant: str, asked: m.Resolve) -> str:
        """Return the adapter by the engine's name, or nothing for the base. It is loaded then."""
        path = asked.model_path
        if asked.sampler_id is not None:
            sampler = self._of(tenant, asked.sampler_id)
            if sampler.run is not None:
                session = self._sessions.of(tenant, sampler.id.partition(":")[0])
                source = sampler if sampler.kind == "snapshot" else self._of_run(sampler)[-1]
                return self._load(self._name(sampler), session.folder / source.place)
            path = sampler.path
        if path is not None:
            return self._load_checkpoint(self._checkpoints.find(path, tenant))
        if asked.sampler_id is None:
            self.check_base(asked.base_model or "")
        return ""

    def has(self, adapter: str) -> bool:
        return self._engine.has_loaded(adapter)

    def check_base(self, name: str) -> None:
        if name != self._model:
            raise TinkerRefusal(f"there is no base model {name[:200]!r}: this server has {self._model!r}", 404)

    def forget_checkpoint(self, gone: StoredCheckpoint) -> None:
        self.remove(gone.adapter)

    def forget_session(self, session: TinkerSession) -> None:
        for id in self.of_session(session):
            self._drop(session, self._samplers[id])

    def remove(self, adapter: str) -> None:
        with self._loading:
            self._loaded.pop(adapter, None)
        with suppress(UnknownAdapter):
            self._engine.remove(adapter)

    def _of(self, tenant: str, id: str) -> Sampler:
        sampler = self._samplers.get(id)
        if sampler is None or sampler.tenant != tenant:
            raise TinkerRefusal(
                f"there is no sampler {id[:80]!r}: its session has ended, or {SNAPSHOTS} newer ones of its run were made (a path keeps one)",
                404,
            )
        self._sessions.of(tenant, id.partition(":")[0])
        return sampler

    def _of_run(self, sampler: Sampler) -> list[Sampler]:
        """Return the samplers of this kind that the same run has, the oldest first."""
        with self._lock:
            found = [each for each in self._samplers.values() if each.run == sampler.run and each.kind == sampler.kind]
        return sorted(
            (each for each in found if each.id != sampler.id or each.number == sampler.number),
            key=lambda each: each.number,
        )

    def _name(self, sampler: Sampler) -> str:
        """Return the engine's name of what a run's sampler has."""
        return private_name(sampler.tenant, sampler.id if sampler.kind == "snapshot" else f"{sampler.run}:inflight")

    def _add(self, session: TinkerSession, sampler: Sampler) -> None:
        here = sum(each.tenant == sampler.tenant for each in list(self._samplers.values()))
        if here + self._sessions.elsewhere.count(sampler.tenant, f"*{SUFFIX}") >= SAMPLERS:
            raise TinkerRefusal(f"this key has {SAMPLERS} samplers: finish some of its sessions", 429)
        write_facts(session.folder / f"{sampler.id.rpartition(':')[2]}{SUFFIX}", sampler)
        with self._lock:
            self._samplers[sampler.id] = sampler

    def _drop(self, session: TinkerSession, sampler: Sampler) -> None:
        with self._lock:
            self._samplers.pop(sampler.id, None)
        (session.folder / f"{sampler.id.rpartition(':')[2]}{SUFFIX}").unlink(missing_ok=True)
        if sampler.run is not None:
            shutil.rmtree(session.folder / sampler.place, ignore_errors=True)
            self.remove(self._name(sampler))

    def _load_checkpoint(self, found: StoredCheckpoint) -> str:
        if found.run.base_model != self._model:
            raise TinkerRefusal(
                f"{found.path} is of the base {found.run.base_model!r}: this server has {self._model!r}"
            )
        return self._load(found.adapter, found.folder)

    def _load(self, adapter: str, folder: Path) -> str:
        """Have the engine serve an adapter of a folder as it was trained, and return its name."""
        with self._loading:
            if self._engine.has_loaded(adapter):
                self._loaded[adapter] = None
                self._loaded.move_to_end(adapter)
                return adapter
            weights = read_adapter(folder)
            weights = replace(weights, trained=trained_in(weights.tensors.values()))
            self._with_room(adapter, lambda: self._engine.add(adapter, weights))
        return adapter

    def _with_room(self, adapter: str, add: Callable[[], Any]) -> Any:
        """Add an adapter to the engine; those used least give way when there are too many, or too little memory."""
        with self._loading:
            while True:
                try:
                    added = add()
                    break
                except NoAdapterMemory:
                    if not (others := [each for each in self._loaded if each != adapter]):
                        raise
                    self.remove(others[0])
            self._loaded[adapter] = None
            self._loaded.move_to_end(adapter)
            while len(self._loaded) > LOADED:
                self.remove(next(iter(self._loaded)))
        return added


def save_adapter(run: Run, model: str, folder: Path) -> None:
    """Write a run's adapter as PEFT saves it. To be called in the run's turn."""
    weights = weights_of(run.model, adapter_of(run.model, None))
    weights.config["base_model_name_or_path"] = model
    write_adapter(weights, folder)


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Have a folder written, in the place of an old one."""
    part = target.with_name(f".{target.name}.new")
    shutil.rmtree(part, ignore_errors=True)
    write(part)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
