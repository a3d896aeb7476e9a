"""What is told of runs, sessions and checkpoints, as JSON, and the addresses from which adapters are downloaded."""

import hmac
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from symbiosis.base.secret_files import create_secret
from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker.checkpoint_store import CheckpointStore, RunFacts, moment
from symbiosis.server.tinker.samplers import Samplers
from symbiosis.server.tinker.tenant_runs import TenantRuns
from symbiosis.server.tinker.tinker_messages import TinkerRefusal
from symbiosis.server.tinker.tinker_sessions import TinkerSessions

SECRET_BYTES = 32
URL_S = 3600  # a signed address is good for


class RunListing:
    """What the routes that begin with GET tell, and those that change a checkpoint.

    Args:
        secret: A file with which addresses are signed; made if it is not there.
    """

    def __init__(
        self, checkpoints: CheckpointStore, sessions: TinkerSessions, runs: TenantRuns, samplers: Samplers, secret: Path
    ) -> None:
        self._checkpoints, self._sessions, self._runs, self._samplers = checkpoints, sessions, runs, samplers
        self._secret = _secret_in(secret)

    def weights(self, tenant: str, asked: m.WeightsInfo) -> Any:
        run = self._checkpoints.find(asked.tinker_path, tenant).run
        return {
            "base_model": run.base_model, "is_lora": True, "lora_rank": run.lora.rank, "train_unembed": run.lora.train_unembed,
            "train_mlp": run.lora.train_mlp, "train_attn": run.lora.train_attn,
        }  # fmt: skip

    def runs(self, tenant: str, asked: m.ListRuns) -> bytes:
        found = self._checkpoints.runs(tenant)
        told = [self._told_run(id, facts) for id, facts in found[asked.offset : asked.offset + asked.limit]]
        return as_json({"training_runs": told, "cursor": _cursor(asked, len(found))})

    def run(self, tenant: str, asked: m.GetRun) -> bytes:
        return as_json(self._told_run(asked.run_id, self._checkpoints.run(asked.run_id, tenant)))

    def _told_run(self, id: str, facts: RunFacts) -> dict[str, Any]:
        saved = self._checkpoints.of_run(id, facts.tenant)
        last = {
            kind: next((each.told() for each in saved if each.id.startswith(f"{kind}/")), None)
            for kind in ("weights", "sampler_weights")
        }
        run = self._runs.get(facts.tenant, id)
        seen = run.seen if run else max([facts.created, *(each.facts.time for each in saved)])
        return {
            "training_run_id": id, "base_model": facts.base_model, "model_owner": facts.tenant, "is_lora": True, "corrupted": False,
            "lora_rank": facts.lora.rank, "last_request_time": moment(seen), "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"], "user_metadata": facts.user_metadata,
        }  # fmt: skip

    def session(self, tenant: str, asked: m.GetSession) -> bytes:
        session = self._sessions.get(asked.session_id)
        if session is None or session.tenant != tenant or (facts := session.facts) is None:
            raise TinkerRefusal(f"there is no session {asked.session_id[:80]!r}", 404)
        return as_json({
            "training_run_ids": [each.id for each in self._runs.of_session(session)], "sampler_ids": self._samplers.of_session(session),
            "user_metadata": facts.user_metadata, "display_name": facts.display_name,
        })  # fmt: skip

    def checkpoints(self, tenant: str, asked: m.ListCheckpoints) -> bytes:
        if asked.run_id is not None:
            return as_json({"checkpoints": [each.told() for each in self._checkpoints.of_run(asked.run_id, tenant)]})
        found = self._checkpoints.of_tenant(tenant)
        told = [each.told() for each in found[asked.offset : asked.offset + asked.limit]]
        return as_json({"checkpoints": told, "cursor": _cursor(asked, len(found))})

    def change(self, tenant: str, asked: m.ChangeCheckpoint) -> Any:
        found = self._checkpoints.find(f"tinker://{asked.run_id}/{asked.checkpoint_id}", tenant, own=True)
        if asked.public is not None:
            self._checkpoints.change(found, public=asked.public)
        if asked.ttl_seconds is not None:
            self._checkpoints.change(found, expires=self._checkpoints.expiry(asked.ttl_seconds))

    def delete(self, tenant: str, asked: m.DeleteCheckpoint) -> Any:
        found = self._checkpoints.find(f"tinker://{asked.run_id}/{asked.checkpoint_id}", tenant, own=True)
        self._checkpoints.delete(found)
        self._samplers.forget_checkpoint(found)

    def files(self, tenant: str, asked: m.CheckpointFiles) -> Any:
        found = self._checkpoints.find(f"tinker://{asked.run_id}/{asked.checkpoint_id}", tenant)
        if not found.id.startswith("external_weights/"):
            raise TinkerRefusal("only external weights are downloaded: save_weights_external makes them")
        expires = int(time.time()) + URL_S
        names = sorted(
            each.name
            for each in found.folder.iterdir()
            if each.suffix in (".json", ".safetensors") and each.name != "checkpoint.json"
        )
        signed = {name: self._signature(found.path, name, expires) for name in names}
        return {"expires": moment(expires), "at": expires, "names": signed}

    def signed_file(self, tenant: str, asked: m.SignedFile) -> str:
        """Return where a file lies, for whoever has its signature."""
        path = f"tinker://{asked.run_id}/{asked.checkpoint_id}"
        right = self._signature(path, asked.name, asked.expires)
        if not hmac.compare_digest(right, asked.signature) or asked.expires < time.time():
            raise TinkerRefusal("this address is wrong, or has expired: ask for external_weights_urls again", 403)
        run = self._checkpoints.facts_of(asked.run_id)
        return str(self._checkpoints.find(path, run.tenant if run else "").folder / asked.name)

    def _signature(self, path: str, name: str, expires: int) -> str:
        return hmac.new(self._secret, f"{path} {name} {expires}".encode(), "sha256").hexdigest()


def _secret_in(file: Path) -> bytes:
    """Return what is in a file, which is made if it is not there. Servers that begin at once have the same one."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = file.with_name(f".{file.name}.{os.getpid()}")
        own.unlink(missing_ok=True)
        with os.fdopen(create_secret(own), "wb") as made:
            made.write(secrets.token_bytes(SECRET_BYTES))
        with suppress(FileExistsError):
            file.hardlink_to(own)
        own.unlink()
    return file.read_bytes()


def as_json(told: dict[str, Any]) -> bytes:
    """Return what the other process passes on as it is: metadata are JSON, of which nothing is made."""
    return msgspec.json.encode(told)


def _cursor(asked: m.ListRuns | m.ListCheckpoints, total: int) -> dict[str, int]:
    return {"offset": asked.offset, "limit": asked.limit, "total_count": total}
