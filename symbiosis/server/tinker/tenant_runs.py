"""The runs of all tenants, and their requests. What was promised is on disk before it is promised, and the engine does each number once: so a process
that is killed loses nothing."""

import logging
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from symbiosis.errors import Busy, SymbiosisError
from symbiosis.server.ipc.tenant_threads import TenantThreads
from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker.checkpoint_store import CheckpointStore, RunFacts, metadata, private_name
from symbiosis.server.tinker.disk_shares import DiskShares
from symbiosis.server.tinker.gone_servers import REQUESTS
from symbiosis.server.tinker.lora_targets import lora_config
from symbiosis.server.tinker.promises import outcome_of_error
from symbiosis.server.tinker.request_folder import RequestFolder
from symbiosis.server.tinker.run_requests import RunRequests, TenantRun, check_optimizer
from symbiosis.server.tinker.samplers import Samplers
from symbiosis.server.tinker.tinker_messages import PromiseOutcome, TinkerRefusal
from symbiosis.server.tinker.tinker_sessions import TinkerSession, TinkerSessions
from symbiosis.server.tinker.training_figures import RunFigures, TenantTraining, TrainingCounters
from symbiosis.training import Engine as Trainer
from symbiosis.training import Run
from symbiosis.training.command_order import EARLY

logger = logging.getLogger("symbiosis")

RUNS = 1024  # of one tenant, at a time
LOOK_S = 0.2  # between two tries to make a run
RUN_BYTES = 1 << 16  # that a run takes on the disk when it begins, or more
WAITING_BYTES = 256 << 20  # of one tenant's requests that are not done: their data are in memory


class TenantRuns:
    """All runs of one server."""

    def __init__(
        self, trainer: Trainer, config: Any, checkpoints: CheckpointStore, sessions: TinkerSessions, samplers: Samplers, model: str,
        shares: DiskShares, fingerprint: str,
    ) -> None:  # fmt: skip
        self._trainer, self._config, self._model, self._shares = trainer, config, model, shares
        self._fingerprint = fingerprint
        self._checkpoints, self._sessions, self._samplers = checkpoints, sessions, samplers
        self._runs: dict[str, TenantRun] = {}
        self._counters = TrainingCounters()
        self._requests = RunRequests(checkpoints, samplers, model, self._counters)
        self._lock = threading.Lock()  # held for moments only
        self._making = threading.Lock()  # PEFT draws from the one random state that there is
        self._makers = TenantThreads(2, "tinker-make")  # nobody waits behind all the runs that another begins
        self._go_on()

    def __iter__(self) -> Any:
        return iter(list(self._runs.values()))

    def get(self, tenant: str, id: str) -> TenantRun | None:
        run = self._runs.get(id)
        return run if run is not None and run.tenant == tenant else None

    def of(self, tenant: str, id: str) -> TenantRun:
        """Return a run of this tenant's that is made."""
        run = self._runs.get(id)
        if run is None or run.tenant != tenant:
            raise TinkerRefusal(
                f"there is no run {id[:80]!r}, or its session has ended: begin one from a checkpoint",
                410 if run is None else 404,
            )
        self._sessions.of(tenant, id.partition(":")[0])
        if not run.created.done():
            raise TinkerRefusal("this run is being made: ask again in a moment", 429)
        if error := run.created.result().error:
            raise TinkerRefusal(error)
        run.seen = time.time()
        return run

    def of_session(self, session: TinkerSession) -> list[TenantRun]:
        return [each for each in self if each.id.startswith(f"{session.id}:")]

    def forget_session(self, session: TinkerSession, why: str) -> None:
        for run in self.of_session(session):
            with self._lock:
                self._runs.pop(run.id, None)
            run.requests.remove()
            self._checkpoints.end_run(run.id)
            for outcome in list(run.outcomes.values()):
                with suppress(InvalidStateError):  # it is done
                    outcome.set_result(PromiseOutcome(error=why, category="user"))
            if run.run is not None:
                self._makers.submit(run.tenant, run.run.close)
            self._samplers.remove(private_name(run.tenant, run.id))

    def close(self) -> None:
        self._makers.close()

    # ------------------------------------------------------------- a run begins

    def create(self, tenant: str, asked: m.CreateModel) -> m.Promise:
        self._samplers.check_base(asked.base_model)
        check_optimizer(asked.optimizer_config)
        if asked.lora_config is None:
            raise TinkerRefusal("create_model needs a lora_config: this server trains adapters, and no base")
        lora_config(asked.lora_config, self._config)
        facts = RunFacts(
            tenant=tenant, base_model=self._model, lora=asked.lora_config, created=time.time(), user_metadata=metadata(asked),
            fingerprint=self._fingerprint,
        )  # fmt: skip
        return self._begin(tenant, asked.session_id, asked.model_seq_id, facts, asked)

    def load(self, tenant: str, asked: m.LoadWeights) -> m.Promise:
        """Load a checkpoint: into a run that is there, or a new one."""
        if asked.model_id is not None:
            return self.put(tenant, asked)
        check_optimizer(asked.optimizer_config)
        found = self._requests.found(tenant, asked)
        if asked.session_id is None or asked.model_seq_id is None:
            raise TinkerRefusal("load_weights needs a model_id, or a session_id and a model_seq_id")
        if asked.base_model is not None:
            self._samplers.check_base(asked.base_model)
        facts = RunFacts(
            tenant=tenant, base_model=self._model, lora=found.run.lora, created=time.time(), user_metadata=metadata(asked),
            fingerprint=self._fingerprint,
        )  # fmt: skip
        return self._begin(tenant, asked.session_id, asked.model_seq_id, facts, asked)

    def _begin(
        self, tenant: str, session_id: str, number: int, facts: RunFacts, asked: m.CreateModel | m.LoadWeights
    ) -> m.Promise:
        """Begin a run. Asked for again, it is the same one."""
        session = self._sessions.of(tenant, session_id)
        if not 0 <= number < 10**9:
            raise TinkerRefusal(f"model_seq_id is a number from 0 on, and not {number}")
        id = f"{session.id}:train:{number}"
        promise = m.Promise(request_id=f"{id}/0", model_id=id)
        self._shares.take(tenant, RUN_BYTES + 2 * len(asked.metadata))
        elsewhere = self._sessions.elsewhere.count(tenant, f"*{REQUESTS}")
        with self._lock:
            if (known := self._runs.get(id)) is not None:
                known.requests.put(0, asked)  # which must be the same
                return promise
            if elsewhere + sum(each.tenant == tenant for each in self._runs.values()) >= RUNS:
                raise TinkerRefusal(f"this key has {RUNS} runs: finish some of its sessions", 429)
            requests = RequestFolder(session.folder / f"{number}{REQUESTS}")
            run = self._runs[id] = TenantRun(id, tenant, facts.in_memory, requests)
        self._checkpoints.begin_run(id, facts)
        run.requests.put(0, asked)
        self._makers.submit(tenant, partial(self._make, run, False))
        return promise

    def _go_on(self) -> None:
        """Take up what an earlier process had. What it had begun and nobody can ask for any more is removed."""
        there = set(self._trainer.names)
        for session in self._sessions:
            for folder in session.folder.glob(f"*{REQUESTS}"):
                id, requests = f"{session.id}:train:{folder.name.removesuffix(REQUESTS)}", RequestFolder(folder)
                facts = self._checkpoints.facts_of(id)
                if facts is None or requests.get(0) is None:
                    requests.remove()
                    continue
                run = self._runs[id] = TenantRun(id, facts.tenant, facts.in_memory, requests)
                self._makers.submit(run.tenant, partial(self._make, run, id in there))
        for id in there - self._runs.keys():
            self._makers.submit("", partial(self._remove, id))

    def _remove(self, id: str) -> None:
        """Remove what the trainer has of a run that nobody can ask for. What is damaged stays, and keeps nobody from being served."""
        try:
            self._trainer.open(id).close()
        except (SymbiosisError, OSError) as error:
            logger.warning("what is left of the run %s cannot be removed: %s", id, error)

    def _make(self, run: TenantRun, is_there: bool) -> None:
        """Make a run, or open one that is there, and begin what it was asked for."""
        if run.id not in self._runs:
            run.created.set_result(PromiseOutcome(error="its session has ended", category="user"))
            return
        asked = run.requests.get(0)
        body = {"type": "create_model", "model_id": run.id}
        try:
            if run.facts.fingerprint not in ("", self._fingerprint):
                raise TinkerRefusal(
                    "this run began on another base than the server has now: begin one from a checkpoint"
                )
            if not self._trainer.has_room(run.tenant):
                raise Busy("its tenant has its part of what may wait")
            if isinstance(asked, m.LoadWeights):
                body = {"type": "load_weights", "model_id": run.id, "path": asked.path}
            run.run = self._trainer.open(run.id) if is_there else self._new(run, asked)
            outcome = PromiseOutcome(body=body)
        except Busy:
            time.sleep(LOOK_S)
            with suppress(RuntimeError):  # the server ends
                self._makers.submit(run.tenant, partial(self._make, run, is_there))
            return
        except Exception as error:
            outcome = outcome_of_error(error)
        run.created.set_result(outcome)
        if run.run is None:
            return
        if run.id not in self._runs:  # its session has ended meanwhile
            run.run.close()
            return
        with suppress(Busy):  # those that are left are begun when somebody asks for their outcomes
            for number in run.requests.numbers:
                if number >= run.trained.next_number:
                    self._outcome(run, number)

    def _new(self, run: TenantRun, asked: Any) -> Run:
        with self._making:
            if isinstance(asked, m.LoadWeights):
                found = self._requests.found(run.tenant, asked)
                return self._trainer.load(found.folder, optimizer=asked.optimizer, tenant=run.tenant, name=run.id)
            config = lora_config(run.facts.lora, self._config)
            return self._trainer.create(config, seed=run.facts.lora.seed, tenant=run.tenant, name=run.id)

    # ------------------------------------------------------------- its requests

    def put(self, tenant: str, asked: Any) -> m.Promise:
        """Keep a request that has a number, and begin it in its turn. The same one may come again."""
        run = self.of(tenant, asked.model_id)
        number, kept = asked.seq_id or 0, run.trained.first_kept
        if number < 1:
            raise TinkerRefusal(f"seq_id begins with 1, and this is {number}")
        if number < kept:
            raise TinkerRefusal(
                f"seq_id {number} of this run was carried out, and what came of it is not kept any more", 410
            )
        if number >= (expected := run.trained.next_number) + EARLY:
            raise TinkerRefusal(f"seq_id {number} is far ahead: {expected} has not come yet", 429)
        try:
            run.requests.put(number, asked, lambda nbytes: self._check_room(run, number, nbytes))
        except FileNotFoundError:
            raise TinkerRefusal("the session of this run has ended: begin one from a checkpoint", 410) from None
        before = run.outcomes.get(number)
        if before is None or (before.done() and number >= run.trained.next_number):  # it has waited in vain
            try:
                self._outcome(run, number, asked)
            except Busy as busy:
                run.requests.drop(number)
                raise TinkerRefusal(str(busy), 429) from None
        for old in run.requests.numbers:
            if 0 < old < kept:
                run.requests.drop(old)
                run.outcomes.pop(old, None)
        return m.Promise(request_id=f"{run.id}/{number}", model_id=run.id)

    def _check_room(self, run: TenantRun, number: int, nbytes: int) -> None:
        """Raise `TinkerRefusal` if a tenant has its part of memory and disk. What others wait for is let into memory."""
        mine = [each for each in self if each.tenant == run.tenant and each.run is not None]
        waiting = sum(each.requests.size_from(each.trained.next_number) for each in mine)
        if number != run.trained.next_number and waiting + nbytes > WAITING_BYTES:
            raise TinkerRefusal(f"{waiting} bytes of this key wait: send it again when some are done", 429)
        self._shares.take(run.tenant, nbytes)

    def retrieve(self, tenant: str, asked: m.Retrieve) -> "Future[PromiseOutcome]":
        """Return the outcome of a promise."""
        id, _, number = asked.request_id.rpartition("/")
        run = self.get(tenant, id)
        if run is None or not number.isdecimal() or len(number) > 20:
            raise TinkerRefusal(m.UNKNOWN, 410)
        self._sessions.of(tenant, id.partition(":")[0])
        if number == "0":
            return run.created
        if (found := run.outcomes.get(int(number))) is not None:
            return found
        try:
            return self._outcome(self.of(tenant, id), int(number))
        except Busy as busy:
            raise TinkerRefusal(str(busy), 429) from None

    def _outcome(self, run: TenantRun, number: int, asked: Any = None) -> "Future[PromiseOutcome]":
        """Begin a request, or return what has come of it: the engine does each number once."""
        asked = asked or run.requests.get(number)
        if asked is None:
            raise TinkerRefusal("nothing is known of this request: send it again", 410)
        outcome = self._requests.begin(run, number, asked)
        run.outcomes[number] = outcome
        return outcome

    # ------------------------------------------------------------- what is seen

    def figures(self, tenant: str, asked: m.GetFigures) -> list[RunFigures]:
        """Return the figures of a tenant's runs, those used last first."""
        mine = sorted((each for each in self if each.tenant == tenant and each.run), key=lambda each: -each.seen)
        return [
            RunFigures(
                id=each.id, rank=each.facts.lora.rank, steps=each.trained.steps, waiting=each.waiting, tokens=each.tokens, loss=each.loss,
                kl=None if (apart := each.mismatch) is None else apart.kl_v1, apart=None if apart is None else apart.largest,
            )
            for each in mine[: asked.limit]
        ]  # fmt: skip

    def totals(self, tenant: str, asked: m.GetTotals) -> dict[str, TenantTraining]:
        return self._counters.told(self)

    # ------------------------------------------------------------- as it is now

    def adapter_now(self, run: TenantRun) -> str:
        """Publish a run as it is now, if a step was made since, and return its adapter by the engine's name."""
        adapter = private_name(run.tenant, run.id)
        if run.published != run.trained.steps or not self._samplers.has(adapter):
            run.published = run.trained.steps
            run.trained.when_done(lambda: self._samplers.publish_as(adapter, run.trained.model)).result()
        return adapter
