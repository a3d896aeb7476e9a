"""The training service in the engine's process: sessions, runs and samplers of all tenants, over one engine that trains and one that samples."""

import hmac
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from symbiosis.errors import AdapterError, SymbiosisError, UnknownAdapter
from symbiosis.server.ipc.engine_server import without_paths
from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker.checkpoint_store import (
    CheckpointStore,
    RunFacts,
    StoredCheckpoint,
    moment,
    private_name,
    write_adapter,
)
from symbiosis.server.tinker.command_log import CommandLog, failed
from symbiosis.server.tinker.lora_targets import lora_config
from symbiosis.server.tinker.tinker_messages import Passed, PromiseOutcome, TinkerRefusal
from symbiosis.serving import Engine
from symbiosis.serving.lora.adapter_files import AdapterWeights
from symbiosis.serving.lora.publish import adapter_of, weights_of
from symbiosis.training import Datum, PassResult, Run
from symbiosis.training import Engine as Trainer
from symbiosis.training.losses import loss_of

logger = logging.getLogger("symbiosis")

LOOK_EVERY_S = 5.0
SESSION_S = 600.0  # a session that is silent for so long has ended: the SDK says every 10 s that it is there
MISSING_S = 600.0  # so long a command waits for one before it: the SDK tries to send it for 300 s
SNAPSHOTS = 16  # of one run, that can be sampled from without a name
LOADED = 64  # checkpoints that are kept for sampling; others are read again
SESSIONS, RUNS = 4096, 1024  # of one tenant, at a time
URL_S = 3600  # a signed address is good for
AS_IMPORTANCE = "stable_reinforce"  # whose formula is not published
WARNING = (
    "This server computes importance_sampling where stable_reinforce is asked for (its formula is not published; kl_coeff is not used), "
    "and trains no adapter at the output layer (train_unembed)."
)


@dataclass
class TinkerSession:
    id: str
    tenant: str
    settings: m.CreateSession
    seen: float
    runs: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass
class TenantRun:
    """A run of somebody's, whose adapter is made by its first command."""

    id: str
    tenant: str
    facts: RunFacts
    created: "Future[PromiseOutcome]"
    asked: m.Asked  # by which it was made
    log: CommandLog
    run: Run | None = None
    seen: float = 0.0
    published: int = -1  # steps, when it was published last under its own name
    snapshots: list[str] = field(default_factory=list)  # samplers, the oldest first

    @property
    def trained(self) -> Run:
        assert self.run is not None
        return self.run


@dataclass
class Sampler:
    id: str
    tenant: str
    base_model: str
    adapter: str | None  # by the engine's name; None: the base
    path: str | None  # of a checkpoint, which is read when it is wanted


class TrainingService:
    """What is behind the routes.

    Args:
        engine: It samples.
        trainer: It trains, on the same base.
        folder: Of checkpoints, which outlive the server.
        model: The base, by the name that clients ask for.
        tokenizer: Where clients load its tokenizer from.
    """

    def __init__(self, engine: Engine, trainer: Trainer, folder: Path, model: str, tokenizer: str) -> None:
        self._engine, self._trainer, self.checkpoints = engine, trainer, CheckpointStore(folder)
        self._model, self._tokenizer = model, tokenizer
        self._sessions: dict[str, TinkerSession] = {}
        self._runs: dict[str, TenantRun] = {}
        self._samplers: dict[str, Sampler] = {}
        self._loaded: OrderedDict[str, None] = OrderedDict()  # adapters of checkpoints, the one used last comes last
        self._lock = threading.RLock()  # held for moments only
        self._making = threading.Lock()  # PEFT draws from the one random state that there is
        self._loading = threading.Lock()
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="tinker-publish")  # in the order of commands
        self._maker = ThreadPoolExecutor(2, thread_name_prefix="tinker-make")
        self._secret = secrets.token_bytes(32)
        self._closing = threading.Event()
        self._handlers: dict[type, Callable[[str, Any], Any]] = {
            m.CreateSession: self._create_session, m.Heartbeat: self._heartbeat, m.FinishSession: self._finish_session,
            m.CreateModel: self._create_model, m.LoadWeights: self._load_weights,
            m.Pass: self._pass, m.OptimStep: self._step, m.SaveWeights: self._save, m.SaveForSampler: self._save_for_sampler,
            m.GetInfo: self._info, m.WeightsInfo: self._weights_info, m.CreateSampler: self._create_sampler, m.GetSampler: self._get_sampler,
            m.Resolve: self._resolve, m.Retrieve: self._retrieve, m.ListRuns: self._list_runs, m.GetRun: self._get_run,
            m.ListCheckpoints: self._list_checkpoints, m.ChangeCheckpoint: self._change, m.DeleteCheckpoint: self._delete,
            m.CheckpointFiles: self._files, m.SignedFile: self._signed_file, m.ListSessions: self._list_sessions,
            m.GetSession: self._get_session,
        }  # fmt: skip
        self._watcher = threading.Thread(target=self._watch, name="tinker-watch", daemon=True)
        self._watcher.start()

    def ask(self, tenant: str, asked: m.AnyAsked) -> Any:
        """Do what is asked for. Returns the answer, or, of `Retrieve`, a future of it. Raises `TinkerRefusal`."""
        return self._handlers[type(asked)](tenant, asked)

    def close(self) -> None:
        """End all sessions. Their checkpoints stay."""
        self._closing.set()
        self._watcher.join()
        for session in list(self._sessions.values()):
            self._end_session(session, "the server ends: go on from the last checkpoint")
        for pool in (self._publisher, self._maker):
            pool.shutdown()

    # ------------------------------------------------------------- sessions

    def _create_session(self, tenant: str, asked: m.CreateSession) -> Any:
        with self._lock:
            if sum(each.tenant == tenant for each in self._sessions.values()) >= SESSIONS:
                raise TinkerRefusal(f"this key has {SESSIONS} sessions: finish some", 429)
            session = TinkerSession(secrets.token_hex(16), tenant, asked, time.monotonic())
            self._sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id, "warning_message": WARNING}

    def _heartbeat(self, tenant: str, asked: m.Heartbeat) -> Any:
        self._session(tenant, asked.session_id)
        return {"type": "session_heartbeat"}

    def _finish_session(self, tenant: str, asked: m.FinishSession) -> Any:
        with suppress(TinkerRefusal):  # it has ended already
            self._end_session(
                self._session(tenant, asked.session_id), "its session is finished: begin a new one from a checkpoint"
            )
        return {}

    def _session(self, tenant: str, id: str) -> TinkerSession:
        session = self._sessions.get(id)
        if session is None or session.tenant != tenant:
            raise TinkerRefusal(
                f"there is no session {id[:80]!r}, or it has ended: begin a new one, from the last checkpoint", 410
            )
        session.seen = time.monotonic()
        return session

    def _end_session(self, session: TinkerSession, why: str) -> None:
        with self._lock:
            if self._sessions.pop(session.id, None) is None:
                return
            runs = [self._runs.pop(id) for id in session.runs if id in self._runs]
            samplers = [self._samplers.pop(id) for id in session.samplers if id in self._samplers]
        for run in runs:
            self._forget_run(run, why)
        for sampler in samplers:
            if sampler.path is None and sampler.adapter is not None:
                self._remove(sampler.adapter)

    def _forget_run(self, run: TenantRun, why: str) -> None:
        run.log.end(why)
        if run.run is not None:
            self._maker.submit(run.run.close)
        self._remove(private_name(run.tenant, run.id))

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            now = time.monotonic()
            for session in list(self._sessions.values()):
                if now - session.seen > SESSION_S:
                    logger.info(
                        "session %s of %s is silent for %g s, and has ended",
                        session.id,
                        session.tenant or "nobody",
                        SESSION_S,
                    )
                    self._end_session(
                        session,
                        f"its session was silent for {SESSION_S:g} s, and has ended: begin a new one from a checkpoint",
                    )
            for run in list(self._runs.values()):
                run.log.refuse_late(MISSING_S)
            for gone in self.checkpoints.delete_expired():
                self._forget_checkpoint(gone)

    # ----------------------------------------------------------------- runs

    def _create_model(self, tenant: str, asked: m.CreateModel) -> Any:
        self._check_base(asked.base_model)
        _check_optimizer(asked.optimizer_config)
        settings = asked.lora_config
        if settings is None:
            raise TinkerRefusal("create_model needs a lora_config: this server trains adapters, and no base")
        config = lora_config(settings, self._engine.config)
        facts = RunFacts(
            tenant=tenant, base_model=self._model, lora=settings, created=time.time(), user_metadata=asked.user_metadata
        )

        def make(run: TenantRun) -> PromiseOutcome:
            with self._making:
                run.run = self._trainer.create(config, seed=settings.seed, tenant=tenant)
            return PromiseOutcome(body={"type": "create_model", "model_id": run.id})

        return self._new_run(tenant, asked.session_id, asked.model_seq_id, facts, asked, make)

    def _load_weights(self, tenant: str, asked: m.LoadWeights) -> Any:
        _check_optimizer(asked.optimizer_config)
        found = self.checkpoints.find(asked.path, tenant)
        if asked.optimizer and not found.id.startswith("weights/"):
            raise TinkerRefusal(f"{asked.path} has no optimizer's state: save_state keeps it")
        if asked.model_id is not None:
            run = self._run(tenant, asked.model_id)
            return self._put(run, asked.seq_id or 0, asked, lambda: self._begin_load(run, found, asked.optimizer))
        if asked.session_id is None or asked.model_seq_id is None:
            raise TinkerRefusal("load_weights needs a model_id, or a session_id and a model_seq_id")
        if asked.base_model is not None:
            self._check_base(asked.base_model)
        facts = RunFacts(
            tenant=tenant,
            base_model=self._model,
            lora=found.run.lora,
            created=time.time(),
            user_metadata=asked.user_metadata,
        )
        config = lora_config(found.run.lora, self._engine.config)

        def make(run: TenantRun) -> PromiseOutcome:
            with self._making:
                run.run = made = self._trainer.create(config, seed=0, tenant=tenant)
            made.when_done(lambda: made.read(found.folder, asked.optimizer)).result()
            return PromiseOutcome(body={"type": "load_weights", "model_id": run.id, "path": asked.path})

        return self._new_run(tenant, asked.session_id, asked.model_seq_id, facts, asked, make)

    def _new_run(
        self,
        tenant: str,
        session_id: str,
        number: int,
        facts: RunFacts,
        asked: m.Asked,
        make: Callable[[TenantRun], PromiseOutcome],
    ) -> m.Promise:
        """Begin a run, whose commands are begun when it is made. Asked for again, it is the same one."""
        session = self._session(tenant, session_id)
        if not 0 <= number < 10**9:
            raise TinkerRefusal(f"model_seq_id is a number from 0 on, and not {number}")
        id = f"{session.id}:train:{number}"
        with self._lock:
            if (known := self._runs.get(id)) is not None:
                if known.asked != asked:
                    raise TinkerRefusal(f"model_seq_id {number} of this session is another run")
                return m.Promise(request_id=f"{id}/0", model_id=id)
            if sum(each.tenant == tenant for each in self._runs.values()) >= RUNS:
                raise TinkerRefusal(f"this key has {RUNS} runs: finish some of its sessions", 429)
            run = TenantRun(id, tenant, facts, Future(), asked, CommandLog(), seen=time.time())
            self._runs[id] = run
            session.runs.append(id)

        def made() -> None:
            try:
                self.checkpoints.begin_run(id, facts)
                outcome = make(run)
            except Exception as error:
                outcome = _outcome_of(error)
            run.created.set_result(outcome)
            if run.run is not None and id not in self._runs:  # its session has ended meanwhile
                run.run.close()

        self._maker.submit(made)
        return m.Promise(request_id=f"{id}/0", model_id=id)

    def _run(self, tenant: str, id: str) -> TenantRun:
        """Return a run of this tenant's that is made."""
        run = self._runs.get(id)
        if run is None or run.tenant != tenant:
            raise TinkerRefusal(
                f"there is no run {id[:80]!r}, or its session has ended: begin one from a checkpoint",
                410 if run is None else 404,
            )
        self._session(tenant, id.partition(":")[0])
        if not run.created.done():
            raise TinkerRefusal("this run is being made: ask again in a moment", 429)
        if error := run.created.result().error:
            raise TinkerRefusal(error)
        run.seen = time.time()
        return run

    def _put(
        self, run: TenantRun, number: int, asked: m.Asked, begin: Callable[[], "Future[PromiseOutcome]"]
    ) -> m.Promise:
        def begun() -> "Future[PromiseOutcome]":
            try:
                return begin()
            except Exception as error:
                outcome = _outcome_of(error)
                return failed(outcome.error, outcome.category)

        run.log.put(number, asked, begun)
        return m.Promise(request_id=f"{run.id}/{number}", model_id=run.id)

    def _retrieve(self, tenant: str, asked: m.Retrieve) -> "Future[PromiseOutcome]":
        id, _, number = asked.request_id.rpartition("/")
        run = self._runs.get(id)
        if run is None or run.tenant != tenant or not number.isdecimal():
            raise TinkerRefusal("nothing is known of this request, or its session has ended", 410)
        self._session(tenant, id.partition(":")[0])
        return run.created if number == "0" else run.log.outcome(int(number))

    # ------------------------------------------------------- commands of runs

    def _pass(self, tenant: str, asked: m.Pass) -> Any:
        run = self._run(tenant, asked.model_id)
        return self._put(run, asked.seq_id, asked, lambda: self._begin_pass(run, asked))

    def _begin_pass(self, run: TenantRun, asked: m.Pass) -> "Future[PromiseOutcome]":
        loss, config, metrics = asked.loss_fn, asked.config, dict[str, float]()
        if loss == AS_IMPORTANCE:
            loss, config, metrics = "importance_sampling", {}, {"computed_as_importance_sampling:max": 1.0}
        data = [_datum(number, each) for number, each in enumerate(asked.data)]
        if asked.forward_only:
            begun = run.trained.forward(data)
            return _after(begun, lambda found: _passed(found, data, metrics, _loss(loss, found, data, config)))
        begun = run.trained.forward_backward(data, loss, config)
        return _after(begun, lambda found: _passed(found, data, metrics, found.loss))

    def _step(self, tenant: str, asked: m.OptimStep) -> Any:
        run = self._run(tenant, asked.model_id)
        adam = asked.adam_params
        if adam is None:
            kind = (asked.optimizer_params or {}).get("type")
            raise TinkerRefusal(f"this server steps by AdamW: send adam_params, and not those of {str(kind)[:50]!r}")
        clip = adam.grad_clip_norm if adam.grad_clip_norm > 0 else None

        def begin() -> "Future[PromiseOutcome]":
            betas = adam.beta1, adam.beta2
            norm = run.trained.step(adam.learning_rate, betas, adam.eps, adam.weight_decay, clip)
            return _after(
                norm, lambda found: PromiseOutcome(body={"type": "optim_step", "metrics": {"grad_norm:mean": found}})
            )

        return self._put(run, asked.seq_id, asked, begin)

    def _begin_load(self, run: TenantRun, found: StoredCheckpoint, optimizer: bool) -> "Future[PromiseOutcome]":
        trained = run.trained
        loaded = trained.when_done(lambda: trained.read(found.folder, optimizer))
        return _after(
            loaded, lambda _: PromiseOutcome(body={"type": "load_weights", "model_id": run.id, "path": found.path})
        )

    def _save(self, tenant: str, asked: m.SaveWeights) -> Any:
        run = self._run(tenant, asked.model_id)
        kind = "weights" if asked.kind == "training" else "external_weights"

        def begin() -> "Future[PromiseOutcome]":
            target = self.checkpoints.place(run.id, kind, asked.path, asked.overwrite)
            body = {
                "type": "save_weights" if kind == "weights" else "save_weights_external",
                "path": f"tinker://{run.id}/{kind}/{asked.path}",
            }
            put = partial(self.checkpoints.put, target, ttl=asked.ttl_seconds, metadata=asked.user_metadata)
            if kind == "weights":
                return _after(
                    run.trained.when_done(lambda: put(run.trained.write)), lambda _: PromiseOutcome(body=body)
                )
            return self._published(run, lambda weights: put(partial(write_adapter, weights)), body)

        return self._put(run, asked.seq_id, asked, begin)

    def _save_for_sampler(self, tenant: str, asked: m.SaveForSampler) -> Any:
        run = self._run(tenant, asked.model_id)
        begin = self._begin_named_sampler if asked.path is not None else self._begin_sampler
        return self._put(run, asked.seq_id, asked, lambda: begin(run, asked))

    def _begin_named_sampler(self, run: TenantRun, asked: m.SaveForSampler) -> "Future[PromiseOutcome]":
        target = self.checkpoints.place(run.id, "sampler_weights", str(asked.path))
        path = f"tinker://{run.id}/sampler_weights/{asked.path}"

        def publish(weights: AdapterWeights) -> None:
            self.checkpoints.put(target, partial(write_adapter, weights), asked.ttl_seconds, asked.user_metadata)

        return self._published(run, publish, {"type": "save_weights_for_sampler", "path": path})

    def _begin_sampler(self, run: TenantRun, asked: m.SaveForSampler) -> "Future[PromiseOutcome]":
        number = asked.sampling_session_seq_id
        if number is None or number < 0:
            raise TinkerRefusal("save_weights_for_sampler needs a path, or a sampling_session_seq_id")
        session_id = run.id.partition(":")[0]
        id = f"{session_id}:sample:{number}"
        is_inflight = asked.kind == "inflight"
        adapter = private_name(run.tenant, run.id if is_inflight else id)

        def published(version: int) -> PromiseOutcome:
            self._add_sampler(Sampler(id, run.tenant, self._model, adapter, None), session_id)
            if not is_inflight:
                run.snapshots.append(id)
                for old in run.snapshots[:-SNAPSHOTS]:
                    self._drop_snapshot(run, old)
            body = {"type": "save_weights_for_sampler", "sampling_session_id": id, "model_version": version}
            return PromiseOutcome(body=body)

        trained = run.trained
        return _after(trained.when_done(lambda: self._engine.publish(adapter, trained.model)), published)

    def _published(
        self, run: TenantRun, publish: Callable[[AdapterWeights], object], body: dict[str, Any]
    ) -> "Future[PromiseOutcome]":
        """Copy the adapter in its turn, and hand the copy out while training goes on."""
        done: Future[PromiseOutcome] = Future()
        trained = run.trained

        def hand_out(copied: "Future[AdapterWeights]") -> None:
            try:
                weights = copied.result()
                weights.config["base_model_name_or_path"] = self._model
                publish(weights)
                done.set_result(PromiseOutcome(body=body))
            except Exception as error:
                done.set_result(_outcome_of(error))

        copied = trained.when_done(lambda: weights_of(trained.model, adapter_of(trained.model, None)))
        copied.add_done_callback(lambda copied: self._publisher.submit(hand_out, copied))
        return done

    # -------------------------------------------------------------- samplers

    def _create_sampler(self, tenant: str, asked: m.CreateSampler) -> Any:
        session = self._session(tenant, asked.session_id)
        adapter = None
        if asked.model_path is not None:
            found = self.checkpoints.find(asked.model_path, tenant)
            adapter = private_name(found.run.tenant, found.path)
            self._load_checkpoint(adapter, found)
        else:
            self._check_base(asked.base_model or "")
        id = f"{session.id}:sample:{asked.sampling_session_seq_id}"
        self._add_sampler(Sampler(id, tenant, self._model, adapter, asked.model_path), session.id)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    def _add_sampler(self, sampler: Sampler, session_id: str) -> None:
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None:
                self._samplers[sampler.id] = sampler
                if sampler.id not in session.samplers:
                    session.samplers.append(sampler.id)
        if session is None and sampler.path is None and sampler.adapter is not None:  # it has ended meanwhile
            self._remove(sampler.adapter)

    def _drop_snapshot(self, run: TenantRun, id: str) -> None:
        run.snapshots.remove(id)
        with self._lock:
            sampler = self._samplers.pop(id, None)
        if sampler is not None and sampler.adapter is not None:
            self._remove(sampler.adapter)

    def _get_sampler(self, tenant: str, asked: m.GetSampler) -> Any:
        sampler = self._sampler(tenant, asked.sampler_id)
        return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.path}

    def _sampler(self, tenant: str, id: str) -> Sampler:
        sampler = self._samplers.get(id)
        if sampler is None or sampler.tenant != tenant:
            raise TinkerRefusal(
                f"there is no sampler {id[:80]!r}: its session has ended, or {SNAPSHOTS} newer ones of its run were made (a path keeps one)",
                404,
            )
        if (session := self._sessions.get(id.partition(":")[0])) is not None:
            session.seen = time.monotonic()
        return sampler

    def _resolve(self, tenant: str, asked: m.Resolve) -> str:
        """Return the adapter by the engine's name, or nothing for the base."""
        path = asked.model_path
        if asked.sampler_id is not None:
            sampler = self._sampler(tenant, asked.sampler_id)
            if sampler.path is None:
                return sampler.adapter or ""
            path = sampler.path
        if path is None:
            self._check_base(asked.base_model or "")
            return ""
        if (run := self._runs.get(path)) is not None and run.tenant == tenant:
            return self._as_it_is_now(run)
        found = self.checkpoints.find(path, tenant)
        adapter = private_name(found.run.tenant, found.path)
        self._load_checkpoint(adapter, found)
        return adapter

    def _as_it_is_now(self, run: TenantRun) -> str:
        """Publish a run as it is now, if a step was made since, and return its adapter."""
        adapter = private_name(run.tenant, run.id)
        if run.published != run.trained.steps or not self._engine.has_loaded(adapter):
            run.published = run.trained.steps
            self._engine.publish(adapter, run.trained)
        return adapter

    def _load_checkpoint(self, adapter: str, found: StoredCheckpoint) -> None:
        with self._loading:
            if self._engine.has_loaded(adapter):
                if adapter in self._loaded:
                    self._loaded.move_to_end(adapter)
                return
            self._load(adapter, found.folder)

    def _load(self, adapter: str, source: Path) -> None:
        """Have the engine serve a checkpoint; those used least give way when there are too many, or too little memory."""
        while True:
            try:
                self._engine.add(adapter, source)
                break
            except AdapterError:
                if not self._loaded:
                    raise
                self._remove(self._loaded.popitem(last=False)[0])
        self._loaded[adapter] = None
        while len(self._loaded) > LOADED:
            self._remove(self._loaded.popitem(last=False)[0])

    def _remove(self, adapter: str) -> None:
        with suppress(UnknownAdapter):
            self._engine.remove(adapter)

    # ----------------------------------------------------------- what is told

    def _info(self, tenant: str, asked: m.GetInfo) -> Any:
        run = self._run(tenant, asked.model_id)
        data = {"arch": self._engine.config.model_type, "model_name": self._model, "tokenizer_id": self._tokenizer}
        return {
            "type": "get_info", "model_id": run.id, "model_data": data, "is_lora": True, "lora_rank": run.facts.lora.rank,
            "model_name": self._model,
        }  # fmt: skip

    def _weights_info(self, tenant: str, asked: m.WeightsInfo) -> Any:
        run = self.checkpoints.find(asked.tinker_path, tenant).run
        return {
            "base_model": run.base_model, "is_lora": True, "lora_rank": run.lora.rank, "train_unembed": run.lora.train_unembed,
            "train_mlp": run.lora.train_mlp, "train_attn": run.lora.train_attn,
        }  # fmt: skip

    def _list_runs(self, tenant: str, asked: m.ListRuns) -> Any:
        found = self.checkpoints.runs(tenant)
        told = [self._told_run(id, facts) for id, facts in found[asked.offset : asked.offset + asked.limit]]
        return {"training_runs": told, "cursor": _cursor(asked, len(found))}

    def _get_run(self, tenant: str, asked: m.GetRun) -> Any:
        return self._told_run(asked.run_id, self.checkpoints.run(asked.run_id, tenant))

    def _told_run(self, id: str, facts: RunFacts) -> dict[str, Any]:
        saved = self.checkpoints.of_run(id, facts.tenant)
        last = {
            kind: next((each.told() for each in saved if each.id.startswith(f"{kind}/")), None)
            for kind in ("weights", "sampler_weights")
        }
        run = self._runs.get(id)
        seen = run.seen if run else max([facts.created, *(each.facts.time for each in saved)])
        return {
            "training_run_id": id, "base_model": facts.base_model, "model_owner": facts.tenant, "is_lora": True, "corrupted": False,
            "lora_rank": facts.lora.rank, "last_request_time": moment(seen), "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"], "user_metadata": facts.user_metadata,
        }  # fmt: skip

    def _list_checkpoints(self, tenant: str, asked: m.ListCheckpoints) -> Any:
        if asked.run_id is not None:
            return {"checkpoints": [each.told() for each in self.checkpoints.of_run(asked.run_id, tenant)]}
        found = self.checkpoints.of_tenant(tenant)
        told = [each.told() for each in found[asked.offset : asked.offset + asked.limit]]
        return {"checkpoints": told, "cursor": _cursor(asked, len(found))}

    def _change(self, tenant: str, asked: m.ChangeCheckpoint) -> Any:
        found = self.checkpoints.find(f"tinker://{asked.run_id}/{asked.checkpoint_id}", tenant, own=True)
        if asked.public is not None:
            self.checkpoints.change(found, public=asked.public)
        if asked.ttl_seconds is not None:
            self.checkpoints.change(found, expires=self.checkpoints.expiry(asked.ttl_seconds))

    def _delete(self, tenant: str, asked: m.DeleteCheckpoint) -> Any:
        found = self.checkpoints.find(f"tinker://{asked.run_id}/{asked.checkpoint_id}", tenant, own=True)
        self.checkpoints.delete(found)
        self._forget_checkpoint(found)

    def _forget_checkpoint(self, gone: StoredCheckpoint) -> None:
        adapter = private_name(gone.run.tenant, gone.path)
        with self._loading:
            self._loaded.pop(adapter, None)
        self._remove(adapter)

    def _files(self, tenant: str, asked: m.CheckpointFiles) -> Any:
        found = self.checkpoints.find(f"tinker://{asked.run_id}/{asked.checkpoint_id}", tenant)
        if not found.id.startswith("external_weights/"):
            raise TinkerRefusal("only external weights are downloaded: save_weights_external makes them")
        expires = int(time.time()) + URL_S
        names = sorted(
            each.name
            for each in found.folder.iterdir()
            if each.suffix in (".json", ".safetensors") and each.name != "checkpoint.json"
        )
        return {
            "expires": moment(expires),
            "at": expires,
            "names": {name: self._signature(found.path, name, expires) for name in names},
        }

    def _signed_file(self, tenant: str, asked: m.SignedFile) -> str:
        """Return where a file lies, for whoever has its signature."""
        path = f"tinker://{asked.run_id}/{asked.checkpoint_id}"
        right = self._signature(path, asked.name, asked.expires)
        if not hmac.compare_digest(right, asked.signature) or asked.expires < time.time():
            raise TinkerRefusal("this address is wrong, or has expired: ask for external_weights_urls again", 403)
        run = self.checkpoints.facts_of(asked.run_id)
        return str(self.checkpoints.find(path, run.tenant if run else "").folder / asked.name)

    def _signature(self, path: str, name: str, expires: int) -> str:
        return hmac.new(self._secret, f"{path} {name} {expires}".encode(), "sha256").hexdigest()

    def _list_sessions(self, tenant: str, asked: m.ListSessions) -> Any:
        found = [each.id for each in reversed(list(self._sessions.values())) if each.tenant == tenant]
        return {"sessions": found[asked.offset : asked.offset + asked.limit]}

    def _get_session(self, tenant: str, asked: m.GetSession) -> Any:
        session = self._sessions.get(asked.session_id)
        if session is None or session.tenant != tenant:
            raise TinkerRefusal(f"there is no session {asked.session_id[:80]!r}", 404)
        told = session.settings
        return {
            "training_run_ids": session.runs, "sampler_ids": session.samplers, "user_metadata": told.user_metadata,
            "display_name": told.display_name,
        }  # fmt: skip

    def _check_base(self, name: str) -> None:
        if name != self._model:
            raise TinkerRefusal(f"there is no base model {name[:200]!r}: this server has {self._model!r}", 404)


def _check_optimizer(asked: m.OptimizerKind | None) -> None:
    if asked is not None and asked.type != "adamw":
        raise TinkerRefusal(f"this server steps by AdamW, and not by {asked.type[:50]!r}")


def _cursor(asked: Any, total: int) -> dict[str, int]:
    return {"offset": asked.offset, "limit": asked.limit, "total_count": total}


def _datum(number: int, given: m.PlainDatum) -> Datum:
    arrays = {name: _tensor(each) for name, each in given.inputs.items()}
    try:
        tokens = torch.from_numpy(np.frombuffer(given.tokens, np.int32).copy())
        return Datum(tokens, targets=arrays.pop("target_tokens"), **arrays)
    except SymbiosisError as error:
        raise TinkerRefusal(f"datum {number}: {error}") from None


def _tensor(array: m.Array) -> torch.Tensor:
    return torch.from_numpy(
        np.frombuffer(array.data, np.int64 if array.whole else np.float32).reshape(array.shape).copy()
    )


def _loss(kind: str, found: PassResult, data: list[Datum], config: dict[str, float]) -> float:
    return float(
        sum(loss_of(kind, logprobs, datum, config) for logprobs, datum in zip(found.logprobs, data, strict=True))
    )


def _passed(found: PassResult, data: list[Datum], metrics: dict[str, float], loss: float) -> PromiseOutcome:
    flat = torch.cat([each.float().reshape(-1) for each in found.logprobs])
    shapes = [tuple(each.targets.shape) for each in data]
    told = {"runs_in_pass:mean": float(found.joined), **metrics}
    return PromiseOutcome(passed=Passed(loss=loss, logprobs=flat.numpy().tobytes(), shapes=shapes, metrics=told))


def _after(begun: "Future[Any]", made: Callable[[Any], PromiseOutcome]) -> "Future[PromiseOutcome]":
    """Return what is made of a result, or of its failure."""
    done: Future[PromiseOutcome] = Future()

    def take(begun: "Future[Any]") -> None:
        try:
            outcome = made(begun.result())
        except Exception as error:
            outcome = _outcome_of(error)
        done.set_result(outcome)

    begun.add_done_callback(take)
    return done


def _outcome_of(error: Exception) -> PromiseOutcome:
    """Return what a client is told of a failure, and whose it is."""
    if isinstance(error, SymbiosisError):
        return PromiseOutcome(
            error=str(error) if isinstance(error, TinkerRefusal) else without_paths(str(error)), category="user"
        )
    logger.error("a command of a run failed", exc_info=error)
    return PromiseOutcome(error=f"the server failed: {type(error).__name__}. Its log says more", category="server")
