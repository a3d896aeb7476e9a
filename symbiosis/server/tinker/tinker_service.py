"""The training service in the engine's process: sessions, runs and samplers of all tenants, over one engine that trains and one that samples."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker.checkpoint_store import CheckpointStore
from symbiosis.server.tinker.disk_shares import DiskShares, free_at
from symbiosis.server.tinker.gone_servers import RUNS, SESSIONS, GoneServers
from symbiosis.server.tinker.run_listing import RunListing
from symbiosis.server.tinker.samplers import Samplers
from symbiosis.server.tinker.tenant_runs import TenantRuns
from symbiosis.server.tinker.tinker_sessions import TinkerSession, TinkerSessions
from symbiosis.serving import Engine
from symbiosis.training import Engine as Trainer

LOOK_EVERY_S = 5.0
ROOM_WAIT_S = 0.0  # a key that has its part of what may wait is told at once: no thread waits for it
ORDER_WAIT_S = 600.0  # a request waits so long for one before it: the SDK tries to send it for 300 s
STATE, SERVERS, SECRET = "state", "servers", "secret"  # within the folder of checkpoints


class TrainingService:
    """What is behind the routes.

    Args:
        engine: It samples.
        trainer: It trains, on the same base; with `state=runs_folder(folder, server)` a server that is started again goes on.
        folder: Of checkpoints, and of what else outlives the server.
        model: The base, by the name that clients ask for.
        tokenizer: Where clients load its tokenizer from.
        server: The name of this server among those that share the folder. Its sessions and runs are its own.
    """

    def __init__(
        self, engine: Engine, trainer: Trainer, folder: Path, model: str, tokenizer: str, server: str | None = None
    ) -> None:
        self._engine, self._model, self._tokenizer = engine, model, tokenizer
        self._state = state_folder(folder, server)
        self.checkpoints = CheckpointStore(folder)
        shares = DiskShares(self._folders_of, partial(free_at, folder))
        self._sessions = TinkerSessions(self._state / SESSIONS, self._forget, shares, server)
        self._samplers = Samplers(engine, self.checkpoints, self._sessions, model)
        self._gone = GoneServers(self._state, server)
        self.runs = TenantRuns(
            trainer, engine.config, self.checkpoints, self._sessions, self._samplers, model, shares, engine.fingerprint
        )
        listing = RunListing(self.checkpoints, self._sessions, self.runs, self._samplers, folder / STATE / SECRET)
        self._closing = threading.Event()
        sessions, runs, samplers = self._sessions, self.runs, self._samplers
        self._handlers: dict[type, Callable[[str, Any], Any]] = {
            m.CreateSession: sessions.create, m.Heartbeat: sessions.heartbeat, m.FinishSession: sessions.finish, m.ListSessions: sessions.list,
            m.CreateModel: runs.create, m.LoadWeights: runs.load, m.Retrieve: runs.retrieve,
            m.Pass: runs.put, m.RefusedRequest: runs.put, m.OptimStep: runs.put, m.SaveWeights: runs.put, m.SaveForSampler: runs.put,
            m.CreateSampler: samplers.create, m.GetSampler: samplers.get, m.Resolve: self._resolve, m.GetInfo: self._info,
            m.WeightsInfo: listing.weights, m.ListRuns: listing.runs, m.GetRun: listing.run, m.GetSession: listing.session,
            m.ListCheckpoints: listing.checkpoints, m.ChangeCheckpoint: listing.change, m.DeleteCheckpoint: listing.delete,
            m.CheckpointFiles: listing.files, m.SignedFile: listing.signed_file, m.GetFigures: runs.figures, m.GetTotals: runs.totals,
            m.CountSessions: lambda tenant, asked: len(sessions),
        }  # fmt: skip
        self._watcher = threading.Thread(target=self._watch, name="tinker-watch", daemon=True)
        self._watcher.start()

    def ask(self, tenant: str, asked: m.AnyAsked) -> Any:
        """Do what is asked for. Returns the answer, or, of `Retrieve`, a future of it. Raises `TinkerRefusal`."""
        return self._handlers[type(asked)](tenant, asked)

    def close(self) -> None:
        """Take nothing more. Whoever begins with the same folder has the same sessions, runs and samplers."""
        self._closing.set()
        self._watcher.join()
        self.runs.close()

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            self._sessions.end_silent()
            for gone in self.checkpoints.delete_expired():
                self._samplers.forget_checkpoint(gone)
            for run in self._gone.look():
                self.checkpoints.end_run(run)

    def _folders_of(self, tenant: str) -> list[Path]:
        """Return what a tenant has on the disk, at other servers, too: its checkpoints, its sessions, and what trainers keep of the runs of those."""
        here = [each.folder for each in self._sessions if each.tenant == tenant]
        sessions = [*here, *self._sessions.elsewhere.of(tenant)]
        ids, states = {each.name for each in sessions}, {each.parent.parent for each in sessions}
        runs = [run for state in states for run in (state / RUNS).glob("*:train:*")]
        kept = [run for run in runs if run.name.partition(":train:")[0] in ids]
        return [*self.checkpoints.folders(tenant), *sessions, *kept]

    def _forget(self, session: TinkerSession, why: str) -> None:
        self.runs.forget_session(session, why)
        self._samplers.forget_session(session)

    def _resolve(self, tenant: str, asked: m.Resolve) -> str:
        if asked.sampler_id is None and (run := self.runs.get(tenant, asked.model_path or "")) is not None:
            return self.runs.adapter_now(run)
        return self._samplers.adapter(tenant, asked)

    def _info(self, tenant: str, asked: m.GetInfo) -> Any:
        run = self.runs.of(tenant, asked.model_id)
        data = {"arch": self._engine.config.model_type, "model_name": self._model, "tokenizer_id": self._tokenizer}
        return {
            "type": "get_info", "model_id": run.id, "model_data": data, "is_lora": True, "lora_rank": run.facts.lora.rank,
            "model_name": self._model,
        }  # fmt: skip


def state_folder(folder: Path, server: str | None = None) -> Path:
    """Return where a server keeps what goes on when it is started again.

    >>> state_folder(Path("checkpoints"), "demo-server-1")
    PosixPath('checkpoints/servers/demo-server-1')
    """
    return folder / STATE if server is None else folder / SERVERS / server


def runs_folder(folder: Path, server: str | None = None) -> Path:
    """Return where the trainer keeps its runs."""
    return state_folder(folder, server) / RUNS
