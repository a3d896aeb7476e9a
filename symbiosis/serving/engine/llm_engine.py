"""`Engine`: completions of one base model with any number of adapters."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Tokens
from functools import partial
from itertools import count
from pathlib import Path
from secrets import randbits
from typing import Any, get_args

import msgspec
import torch
from torch import nn

from symbiosis.client import arguments
from symbiosis.client.from_executor import built
from symbiosis.client.weights.remote_weight import close_sessions, remote_weights
from symbiosis.errors import ConfigError
from symbiosis.kernels.gpu.streams import wait_until_done
from symbiosis.serving.engine.engine_loop import Loop
from symbiosis.serving.engine.engine_stats import EngineStats
from symbiosis.serving.engine.limits import check, check_pooling, fitted, most_tokens
from symbiosis.serving.engine.prompt_vector import PromptVector
from symbiosis.serving.engine.reader import Completion, Reader, vector_of
from symbiosis.serving.engine.request_state import RequestState
from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.adapter_files import MOST_TENSOR_BYTES
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter
from symbiosis.serving.lora.publish import of_trainer
from symbiosis.serving.lora.registry import AdapterRegistry, Looked
from symbiosis.serving.lora.target_layers import TargetLayers
from symbiosis.serving.request import Finish, Guide, Output, Pooling, PoolingKind, Request
from symbiosis.serving.runner.dense_runner import make_ready
from symbiosis.serving.runner.model_runner import ModelRunner, bytes_of
from symbiosis.serving.sampling.grammar import Grammar, Grammars
from symbiosis.serving.scheduler.scheduler import Scheduler, StepRules
from symbiosis.serving.scheduler.scheduler_output import BLOCK, Sequence
from symbiosis.serving.serve_options import Policy
from symbiosis.serving.speculation.proposers import speculation
from symbiosis.serving.speculation.speculate_rule import SpeculateRule
from symbiosis.serving.tensor_parallel.leading_runner import LeadingRunner, divided

logger = logging.getLogger("symbiosis")


class Engine:
    """Completions of one base model with any number of adapters, in one batch.

    Args:
        model: Of transformers, wrapped or not, which nobody else may use from now on; or the endpoint of an executor.
        tokenizer: For prompts and answers that are text, and for text by a schema or grammar; or where to load it from.
        adapters: A folder whose subfolders are adapters, loaded when they are first asked for.
        memory: For keys, values and adapters: bytes, or, below 1, a share of what is free. Default: 0.25.
        max_batch: Sequences that run together.
        adapters_in_batch: Adapters that run together; None is no limit.
        prefill_tokens: Tokens of prompts in one step at most, beside all sequences that are being continued.
        policy: "fcfs": first come, first served. "abort": requests whose first token cannot come within `first_token_s` end at once.
            "vtc": tenants get alike.
        max_waiting: Requests under way; more are refused.
        of_tenant: Sequences of one tenant that run together while others wait; None is no limit.
        compiles: Whether the model's layers are compiled by torch, when they first run. Only on a GPU, where its kernels serve the model.
        max_rank: Adapters of a larger rank are refused.
        adapter_memory: The host's memory for adapters, told in the same way. Those of the folder are let go for others, and read again; beyond it
            others are refused. Default: a quarter of what is free.
        max_adapter_bytes: Of the file of an adapter's tensors, if `adapter_memory` is not more. Larger ones are refused.
        name: What the model is called: no adapter may have that name.
        devices: Divide the model over these, with a rank (a process) on each: of every layer each has some heads and columns. Such as ("cpu", "cpu") or
            ("cuda:0", "cuda:1"). `model` is the endpoint of an executor on a CPU of this host, at local://, of which each rank takes its part.
            `memory` is then that of each rank; a share of a CPU's is that of all.
        speculate: "ngram:N" or "draft:CHECKPOINT:N" drafts up to N tokens of each text ahead, and checks them in one step: from what stands in the text
            already, or by a smaller model of the same tokens. Texts are the same, as far as rounding goes; where many decode, fewer are drafted. On a CPU only.
        wait: How long an executor may take to come up, in seconds; None: as long as it may be away later, 60 or `$SYMBIOSIS_PATIENCE_S`.
        bitwise: Each token is computed by itself: its log probability is, bit for bit, the one that `training.Engine(bitwise=True)` computes,
            whatever else runs. An executor has to be started with `batch_invariant`. On a CPU only.

    Attributes:
        config: The base's configuration: of the part that reads and writes text.
        vocabulary: The number of tokens: they are numbered from 0 to below this.
        ends: The tokens that end an answer.
        width: How many numbers a vector of a text has.
        longest: How many tokens of a prompt and its answer together the model takes.
        most_tokens: ... and the memory holds.
        fingerprint: That of the base, as its executor told when this engine joined it; nothing for a model that was handed over.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor, Engine(executor.endpoint, memory=1 << 24) as engine:
    ...     answer = engine.generate(list(b"Once upon a time"), max_tokens=8, temperature=0.0)
    >>> len(answer.tokens), answer.finish.value
    (8, 'length')
    """

    def __init__(
        self,
        model: nn.Module | str,
        tokenizer: Any = None,
        *,
        adapters: Path | str | None = None,
        memory: int | float | None = None,
        max_batch: int = 64,
        adapters_in_batch: int | None = None,
        prefill_tokens: int = 512,
        policy: Policy = "fcfs",
        first_token_s: float = 6.0,
        max_waiting: int = 4096,
        of_tenant: int | None = None,
        max_rank: int = 256,
        adapter_memory: int | float | None = None,
        max_adapter_bytes: int = MOST_TENSOR_BYTES,
        name: str | None = None,
        compiles: bool = False,
        wait: float | None = None,
        devices: Tokens[str] = (),
        speculate: str | None = None,
        bitwise: bool = False,
    ) -> None:
        _check_options(
            policy, max_batch=max_batch, adapters_in_batch=adapters_in_batch, prefill_tokens=prefill_tokens, first_token_s=first_token_s,
            max_waiting=max_waiting, of_tenant=of_tenant, max_rank=max_rank, adapter_memory=adapter_memory, max_adapter_bytes=max_adapter_bytes,
        )  # fmt: skip
        arguments.model_or_endpoint(model)
        rule = None if speculate is None else SpeculateRule.from_text(speculate, len(devices))
        if bitwise and len(devices) > 1:
            raise ConfigError("bitwise is for one device: ranks add up parts of sums")
        if len(devices) > 1:
            options = {"memory": memory, "max_batch": max_batch, "prefill_tokens": prefill_tokens, "compiles": compiles}
            self._served: ModelRunner = divided(model, devices, wait=wait, **options)
            self._own_model: nn.Module | None = self._served.whole
        else:
            self._own_model = built(model, {"wait": wait}, priority="decode") if isinstance(model, str) else None
            given = model if isinstance(model, nn.Module) else self._own_model
            try:
                self._served = make_ready(given, memory, bitwise)  # type: ignore[arg-type]
            except BaseException:
                if self._own_model is not None:
                    close_sessions(self._own_model)
                raise
        served = self._served
        self.tokenizer = _tokenizer(tokenizer)
        self._residency = AdapterCache(served.arena, served.blocks.make_room, served.fetcher)
        if isinstance(served, LeadingRunner):
            served.lead(self._residency)
        self._sites = TargetLayers(served, self._residency)
        self._library = _library(served, adapters, max_rank, adapter_memory, name, max_adapter_bytes)
        self._grammars = Grammars(self.tokenizer, served.vocabulary, served.ends)
        whole = served.whole_prompts
        rules = StepRules(max_batch, adapters_in_batch, prefill_tokens, whole, policy, first_token_s, of_tenant)
        self._speculation = None if rule is None else speculation(rule, served, memory)
        self._scheduler = Scheduler(served.blocks, self._residency, rules, served.release, self._speculation)
        self._ids = count(-1, -1)  # of requests that are made here; those of others are not negative
        served.serve(max_batch, max_batch + prefill_tokens, compiles)
        self._loop = Loop(served, self._scheduler, max_waiting, self._ended)
        self.config, self.vocabulary, self.ends, self.longest = (
            served.config,
            served.vocabulary,
            served.ends,
            served.longest,
        )
        self.width = served.width
        self.most_tokens = most_tokens(served, self._scheduler.piece)
        own = next(remote_weights(self._own_model)) if self._own_model else None
        self.fingerprint = "" if own is None else own.handle.session.fingerprint or ""
        self._loop.following.on_late = self._grammars.was_late
        self._library.on_replaced = partial(self._loop.ask, self._drop)
        self._library.on_let_go = self._leave
        wait_until_done(served.device)  # what was prepared, for the engine's own stream

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Begin a request with the adapter that has this name now. Raises `ConfigError` if it cannot be served.

        Args:
            on_output: Called with each step's tokens, in the engine's thread, so it must not block.
        """
        adapter = None if request.adapter is None else self._library.get(request.adapter)
        pages = 0 if adapter is None else self._residency.pages_of(adapter)
        needs = 0 if adapter is None else adapter.virtual, pages, self._served, self._scheduler.piece
        if request.may_be_shorter:
            request = fitted(request, *needs)
        check(request, *needs)
        head = None if adapter is None else adapter.head
        if request.pooling is not None or head is not None:
            check_pooling(request.pooling, head is not None, self._loop.hidden.why_not)
        if request.sampling.seed is None:
            drawn = msgspec.structs.replace(request.sampling, seed=randbits(63))
            request = msgspec.structs.replace(request, sampling=drawn)
        grammars = [] if (guide := request.sampling.guide) is None else self._begun(request, guide)
        tokens = [0] * (adapter.virtual if adapter else 0) + list(request.prompt)
        now = time.monotonic()
        sequences = [
            Sequence(request, number, [*tokens, *request.chosen_of(number)], adapter, now)
            for number in request.under_way
        ]
        pooling = request.pooling
        vector = None if pooling is None else PromptVector(pooling, head if pooling.kind == "head" else None)
        self._loop.begin(RequestState(request, sequences, grammars, on_output, vector=vector))

    def _begun(self, request: Request, guide: Guide) -> list[Grammar]:
        """Return the grammar of each completion, behind the tokens that were chosen already."""
        self._loop.check(request.id)  # before what costs something; `begin` does so again
        grammars = self._grammars.begin(guide, request.completions, request.tenant)
        for number, grammar in enumerate(grammars):
            for token in request.chosen_of(number):
                if token not in self._served.ends:  # the loop, too, passes these by
                    grammar.take(token)
        return grammars

    def on_pause(self, call: Callable[[], None]) -> None:
        """Have this called after each step, in the engine's thread, when `on_output` was told of all its tokens. It must not block."""
        self._loop.on_pause = call

    def cancel(self, id: int) -> None:
        """End a request. Its memory is free before the next step, or soon after if very much was asked at once. A request that has ended already is no error."""
        self._loop.ask(self._loop.end, id, Finish.CANCELLED, is_end=True)

    def stop(self, id: int, completion: int = 0) -> None:
        """End one completion, whose text has come to a stop string, so that it counts as finished. The others of its request go on. Nothing
        happens to one that has told no token yet, which cannot have come to one, or that has ended already."""
        self._loop.ask(self._loop.stop, id, completion, is_end=True)

    def add(self, name: str, source: Any) -> Adapter:
        """Add an adapter that PEFT has saved in a folder, one in a file as `publish` sends it, or its weights. It replaces one of the same name; requests under way keep the old one."""
        added = self._library.add(name, source)
        logger.info("adapter %r: version %d is loaded", name, added.version)
        return added

    def publish(self, name: str, model: Any, adapter: str | None = None) -> int:
        """Serve what a PEFT model, or a run of `symbiosis.training.Engine`, trains, as it is now; return the version, which answers have as
        `model_version`. Requests under way keep theirs.

        A LoRA on the engine's device is copied from the trainer's parameters, on that device and in their dtype, to memory of its own. Other kinds go
        through the host's memory.

        Args:
            adapter: Which of the model's adapters. Default: the active one.

        >>> import symbiosis
        >>> from peft import LoraConfig
        >>> with symbiosis.Executor("demo") as executor, symbiosis.training.Engine(executor.endpoint) as trainer:
        ...     run = trainer.create(LoraConfig(target_modules=["q_proj"]))
        ...     with Engine(executor.endpoint, memory=1 << 24) as engine:
        ...         version = engine.publish("mine", run)
        ...         answer = engine.generate(list(b"Once upon a time"), adapter="mine", max_tokens=4)
        >>> answer.model_version == version
        True
        """
        added = of_trainer(model, lambda peft: self._library.publish(name, peft, adapter))
        logger.info("adapter %r: version %d is published", name, added.version)
        return added.version

    def remove(self, name: str) -> None:
        """Remove an adapter. Requests under way keep it."""
        self._library.remove(name)
        logger.info("adapter %r is removed", name)

    def _drop(self, old: Adapter) -> None:
        """Free what the memory holds of a version that no later request gets. Where requests under way have it, the last of them does so:
        those that wait bring it again."""
        if not self._loop.versions[old.version]:
            self._served.blocks.forget(old.version)
            self._residency.forget(old.version)

    def _ended(self, adapter: Adapter) -> None:
        if self._library.is_replaced(adapter):
            self._drop(adapter)

    def _leave(self, old: LoadedAdapter) -> None:
        """Free what the device has of an adapter that the library has let go, if that would keep the rest of it in memory, too."""
        if old.own:
            self._loop.ask(self._residency.forget, old.version)

    def adapters(self) -> list[Adapter]:
        """Return the adapters that are loaded."""
        return list(self._library.loaded())

    def look_at_adapters(self, is_enough: Callable[[], bool] = lambda: False) -> Looked:
        """Load the adapters of the folder before they are asked for, as far as there is memory for them; says which cannot be served.

        Args:
            is_enough: Is asked before each: true leaves the others until they are asked for.
        """
        return self._library.look(is_enough)

    def has_loaded(self, name: str) -> bool:
        """Whether an adapter is loaded, and need not be read first."""
        return self._library.has(name)

    def check_adapter(self, name: str) -> None:
        """Raise `AdapterError` if there is no adapter of this name, or if it is known that it cannot be served. Nothing is loaded."""
        self._library.check(name)

    def classes_of(self, name: str) -> int:
        """Return how many classes an adapter tells apart, 0 if it does not classify. It is loaded for that."""
        head = self._library.get(name).head
        return 0 if head is None else len(head.weight)

    def adapter_names(self) -> list[str]:
        """Return the names of all adapters that can be served, also of those in the folder that were never asked for."""
        return self._library.names()

    def figures(self) -> EngineStats:
        """Return what is going on now, and what was counted so far."""
        blocks, pool, counts = self._served.blocks, self._served.arena.pool, self._scheduler.counts
        free, running = pool.free, len(self._scheduler.running)
        return msgspec.structs.replace(
            self._loop.figures,
            running=running,
            waiting=max(0, self._loop.in_flight - running),
            drafted_tokens=0 if self._speculation is None else self._speculation.drafted,
            accepted_tokens=0 if self._speculation is None else self._speculation.accepted,
            prefix_tokens=counts.asked,
            prefix_hits=counts.found,
            pages=pool.total,
            pages_free=free,
            pages_cached=max(0, blocks.spare() - free),
            evictions=counts.evictions,
            adapters=len(self._library.names()),
            adapters_loaded=len(self._library.loaded()),
            adapter_bytes=self._library.bytes,
            adapters_here=self._residency.count,
            adapter_fetches=self._residency.fetches,
            adapter_evictions=self._residency.evictions,
            finished=dict(self._loop.finished),
        )

    @property
    def is_alive(self) -> bool:
        """Whether requests are computed. An engine that is closed computes none."""
        return self._loop.is_alive

    @property
    def is_starved(self) -> bool:
        """Whether a step has failed where no memory can be had any more. It is for good: other steps would fail, too."""
        return self._loop.is_starved

    @property
    def has_lost_ranks(self) -> bool:
        """Whether ranks of this engine die again and again. It is for good."""
        return self._loop.has_lost_ranks

    @property
    def room(self) -> tuple[int, int]:
        """How many more tokens there is memory for, and for how many there is in all."""
        blocks = self._served.blocks
        free, total = blocks.spare(), self._served.arena.pool.total
        return free // blocks.layers * BLOCK, total // blocks.layers * BLOCK

    @property
    def step_s(self) -> float:
        """How many seconds the present step has taken so far."""
        return self._loop.step_s

    def generate(
        self,
        prompt: str | Tokens[int],
        *,
        adapter: str | None = None,
        tenant: str = "",
        stop: str | Iterable[str] = (),
        **sampling: Any,
    ) -> Completion:
        """Complete a prompt, and return the whole completion.

        Args:
            stop: Strings before which the text is cut.
            sampling: The fields of `Sampling`.
        """
        return Reader(self, prompt, adapter, tenant, stop, sampling).wait()

    def stream(
        self,
        prompt: str | Tokens[int],
        *,
        adapter: str | None = None,
        tenant: str = "",
        stop: str | Iterable[str] = (),
        **sampling: Any,
    ) -> AsyncIterator[Completion]:
        """Complete a prompt, and yield what each step adds. Leaving the loop cancels the request."""
        return Reader(self, prompt, adapter, tenant, stop, sampling).parts()

    def embed(
        self,
        prompt: str | Tokens[int],
        *,
        adapter: str | None = None,
        tenant: str = "",
        pooling: PoolingKind = "last",
        normalizes: bool = True,
    ) -> list[float]:
        """Return a vector of a text: its last hidden state, in the same batches as completions.

        Args:
            pooling: Of its "last" token, or the "mean" of all its tokens.
            normalizes: Whether the vector is made of length 1.

        >>> import symbiosis
        >>> with symbiosis.Executor("demo") as executor, Engine(executor.endpoint, memory=1 << 24) as engine:
        ...     vector = engine.embed(list(b"Once upon a time"))
        >>> len(vector), round(sum(each * each for each in vector), 3)
        (192, 1.0)
        """
        return vector_of(self, prompt, adapter, tenant, Pooling(pooling, normalizes))

    def classify(self, prompt: str | Tokens[int], *, adapter: str, tenant: str = "") -> list[float]:
        """Return the probabilities of the classes of a text, by an adapter that PEFT has trained to classify (SEQ_CLS)."""
        return vector_of(self, prompt, adapter, tenant, Pooling("head"))

    def next_id(self) -> int:
        return next(self._ids)

    def close(self, drain: bool = True) -> None:
        """Close the engine. With `drain`, requests under way are finished first; else they are cancelled."""
        self._loop.close(drain)
        self._served.close()
        if self._own_model is not None:
            close_sessions(self._own_model)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)


def _library(
    served: ModelRunner,
    adapters: Path | str | None,
    max_rank: int,
    memory: float | None,
    name: str | None,
    most_file: int,
) -> AdapterRegistry:
    folder, most = Path(adapters) if adapters else None, bytes_of(memory, torch.device("cpu"))
    return AdapterRegistry(served, folder, max_rank, most, name, most_file)


def _tokenizer(given: Any) -> Any:
    if not isinstance(given, str | Path):
        return given
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(given)


def _check_options(policy: str, **numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive, not {value}")
    if policy not in get_args(Policy):
        raise ConfigError(f"policy is {' or '.join(map(repr, get_args(Policy)))}, not {policy!r}")
