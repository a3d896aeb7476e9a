"""What the requests of runs ask of the training engine, and what is answered when they are done."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker.checkpoint_store import CheckpointStore, RunFacts, StoredCheckpoint, metadata
from symbiosis.server.tinker.pass_data import outcome_of_pass, pass_request
from symbiosis.server.tinker.promises import outcome_after
from symbiosis.server.tinker.request_folder import RequestFolder
from symbiosis.server.tinker.samplers import Sampler, Samplers, save_adapter
from symbiosis.server.tinker.tinker_messages import PromiseOutcome, TinkerRefusal
from symbiosis.server.tinker.training_figures import TrainingCounters
from symbiosis.training import Mismatch, PassResult, Run


@dataclass(eq=False)
class TenantRun:
    """A run of somebody's. `created` is the outcome of its making."""

    id: str
    tenant: str
    facts: RunFacts
    requests: RequestFolder
    created: "Future[PromiseOutcome]" = field(default_factory=Future)
    run: Run | None = None
    outcomes: "dict[int, Future[PromiseOutcome]]" = field(default_factory=dict)  # of requests
    tokens: int = 0  # that it has read since the process began
    loss: float | None = None  # of the last pass, by token
    mismatch: Mismatch | None = None  # of sampler and trainer, then
    seen: float = field(default_factory=time.time)
    published: int = -1  # steps, when it was published last under its own name

    @property
    def trained(self) -> Run:
        assert self.run is not None
        return self.run

    @property
    def waiting(self) -> int:
        return sum(not outcome.done() for outcome in list(self.outcomes.values()))


class RunRequests:
    """Begins the requests of all runs of one server."""

    def __init__(
        self, checkpoints: CheckpointStore, samplers: Samplers, model: str, counters: TrainingCounters
    ) -> None:
        self._checkpoints, self._samplers, self._model, self._counters = checkpoints, samplers, model, counters

    def begin(self, run: TenantRun, number: int, asked: Any) -> "Future[PromiseOutcome]":
        """Hand a request to the engine in its turn. One that is refused has its turn, too."""
        submit = partial(run.trained.submit, number)
        try:
            return self._verbs[type(asked)](self, run, submit, asked)  # type: ignore[no-any-return]
        except TinkerRefusal as wrong:
            return outcome_after(submit("call", partial(_refuse, wrong.with_traceback(None))), _nothing)

    def found(self, tenant: str, asked: m.LoadWeights) -> StoredCheckpoint:
        """Return the checkpoint that is to be loaded."""
        found = self._checkpoints.find(asked.path, tenant)
        if found.run.base_model != self._model and asked.base_model is None:
            raise TinkerRefusal(
                f"{asked.path} is of the base {found.run.base_model!r}: name base_model={self._model!r} to begin with it on this one"
            )
        if asked.optimizer and not found.id.startswith("weights/"):
            raise TinkerRefusal(f"{asked.path} has no optimizer's state: save_state keeps it")
        return found

    def _pass(self, run: TenantRun, submit: Callable[..., Any], asked: m.Pass) -> "Future[PromiseOutcome]":
        request = pass_request(asked)

        def told(found: PassResult) -> PromiseOutcome:
            outcome = outcome_of_pass(found, request, asked.forward_only)
            tokens = sum(map(len, request.data))
            run.tokens += tokens
            self._counters.count(run.tenant, tokens=tokens)
            if not asked.forward_only:
                run.loss = found.loss / tokens
                run.mismatch = found.mismatch
            return outcome

        if asked.forward_only:
            return outcome_after(submit("forward", request.data), told)
        return outcome_after(submit("forward_backward", request.data, request.loss, request.config), told)

    def _step(self, run: TenantRun, submit: Callable[..., Any], asked: m.OptimStep) -> "Future[PromiseOutcome]":
        adam = asked.adam_params
        if adam is None:
            kind = (asked.optimizer_params or {}).get("type")
            raise TinkerRefusal(f"this server steps by AdamW: send adam_params, and not those of {str(kind)[:50]!r}")
        clip = adam.grad_clip_norm if adam.grad_clip_norm > 0 else None
        norm = submit("step", adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, clip)

        def told(found: float) -> PromiseOutcome:
            self._counters.count(run.tenant, steps=1)
            return _body("optim_step", metrics={"grad_norm:mean": found})

        return outcome_after(norm, told)

    def _load(self, run: TenantRun, submit: Callable[..., Any], asked: m.LoadWeights) -> "Future[PromiseOutcome]":
        check_optimizer(asked.optimizer_config)

        def read() -> None:
            run.trained.read(self.found(run.tenant, asked).folder, asked.optimizer)

        return outcome_after(submit("call", read), lambda _: _body("load_weights", model_id=run.id, path=asked.path))

    def _save(self, run: TenantRun, submit: Callable[..., Any], asked: m.SaveWeights) -> "Future[PromiseOutcome]":
        kind = "weights" if asked.kind == "training" else "external_weights"
        verb = "save_weights" if kind == "weights" else "save_weights_external"
        write = run.trained.write if kind == "weights" else partial(save_adapter, run.trained, self._model)

        def save() -> None:
            target = self._checkpoints.place(run.id, kind, asked.path, asked.seq_id, asked.overwrite)
            self._checkpoints.put(target, write, asked.seq_id, asked.ttl_seconds, metadata(asked))

        told = _body(verb, path=f"tinker://{run.id}/{kind}/{asked.path}")
        return outcome_after(submit("call", save), lambda _: told)

    def _save_for_sampler(
        self, run: TenantRun, submit: Callable[..., Any], asked: m.SaveForSampler
    ) -> "Future[PromiseOutcome]":
        if asked.path is None:
            return self._sampler(run, submit, asked)
        name, write = asked.path, partial(save_adapter, run.trained, self._model)

        def save() -> None:
            target = self._checkpoints.place(run.id, "sampler_weights", name, asked.seq_id)
            self._checkpoints.put(target, write, asked.seq_id, asked.ttl_seconds, metadata(asked))

        told = _body("save_weights_for_sampler", path=f"tinker://{run.id}/sampler_weights/{name}")
        return outcome_after(submit("call", save), lambda _: told)

    def _sampler(self, run: TenantRun, submit: Callable[..., Any], asked: m.SaveForSampler) -> "Future[PromiseOutcome]":
        number = asked.sampling_session_seq_id
        if number is None or number < 0:
            raise TinkerRefusal("save_weights_for_sampler needs a path, or a sampling_session_seq_id")
        id = f"{run.id.partition(':')[0]}:sample:{number}"
        sampler = Sampler(
            id=id, tenant=run.tenant, base_model=self._model, run=run.id, kind=asked.kind, number=asked.seq_id
        )
        version = submit("call", lambda: self._samplers.publish(run.trained, sampler))
        return outcome_after(
            version,
            lambda found: _body("save_weights_for_sampler", sampling_session_id=id, model_version=int(found)),
        )

    def _refused(self, run: TenantRun, submit: Callable[..., Any], asked: m.RefusedRequest) -> NoReturn:
        raise TinkerRefusal(asked.refusal)

    _verbs: dict[type, Callable[..., Any]] = {
        m.Pass: _pass, m.RefusedRequest: _refused, m.OptimStep: _step, m.LoadWeights: _load, m.SaveWeights: _save, m.SaveForSampler: _save_for_sampler,
    }  # fmt: skip


def check_optimizer(asked: m.OptimizerKind | None) -> None:
    """Raise `TinkerRefusal` for an optimizer that this server does not have."""
    if asked is not None and asked.type != "adamw":
        raise TinkerRefusal(f"this server steps by AdamW, and not by {asked.type[:50]!r}")


def _body(kind: str, **fields: Any) -> PromiseOutcome:
    return PromiseOutcome(body={"type": kind, **fields})


def _refuse(wrong: TinkerRefusal) -> None:
    raise wrong


def _nothing(_: Any) -> PromiseOutcome:
    return PromiseOutcome()
