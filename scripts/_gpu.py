"""Programs of the GPU benchmarks: an executor and LoRA clients on a random Llama, each in a process of its own."""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _processes import Pace, wait_for
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

import symbiosis
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.kernels.integers import modular_product, quantise
from symbiosis.transport.fingerprint import digest

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
TOKENS = 128  # that a decoder makes from one prompt, then it begins again
ROWS = {8: torch.int32, 16: torch.int64}  # what rows consist of, by the bits of the weights
WARM_UP = 4  # steps before anything is measured; captured ones are recorded in the third


class Shape(NamedTuple):
    """Sizes of the model; the default is Llama-2-7B. `others`: what the family's configuration says besides."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 11008
    heads: int = 32
    vocabulary: int = 32000
    family: str = "llama"
    others: tuple[tuple[str, int], ...] = ()

    def config(self) -> Any:
        if self.family == "gpt2":
            return AutoConfig.for_model(
                "gpt2", n_embd=self.hidden, n_inner=self.inner, n_layer=self.layers, n_head=self.heads,
                vocab_size=self.vocabulary, n_positions=1024, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
        others = {"num_key_value_heads": self.heads} | dict(self.others)
        return AutoConfig.for_model(
            self.family, hidden_size=self.hidden, intermediate_size=self.inner, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, vocab_size=self.vocabulary, max_position_embeddings=4096, **others,
        )  # fmt: skip

    def build(self, device: str) -> nn.Module:
        """The model in bfloat16, with random weights."""
        torch.manual_seed(0)
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(self.config(), dtype=torch.bfloat16)
        return model.eval()

    @property
    def attention(self) -> tuple[str, ...]:
        """What an adapter is put on."""
        return ("c_attn",) if self.family == "gpt2" else ATTENTION


class Job(NamedTuple):
    """What a program does again and again. `length`: tokens of each sequence, or of the prompt."""

    kind: str
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """... that one step makes or learns from."""
        return self.batch * (self.length if self.kind == "train" else 1)


class Lora(NamedTuple):
    """An adapter."""

    rank: int = 8
    targets: tuple[str, ...] = ATTENTION


DEFAULT_LORA = Lora()


class Serving:
    """An executor."""

    executor_class = symbiosis.Executor

    def __init__(self, shape: Shape, device: str, endpoint: str, options: dict[str, Any]) -> None:
        self._executor = self.executor_class(shape.build(device), listen=[endpoint], **options)
        if torch.cuda.is_available():  # shared weights are a copy of the model's, which is not needed any more
            gc.collect()
            torch.cuda.empty_cache()

    def endpoints(self) -> list[str]:
        return self._executor.endpoints

    def close(self) -> None:
        """Let go of the model's memory."""
        self._executor.close()
        del self._executor
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class TimedServer(ExecutorLoop):
    """Knows where its CPU's time goes: `seconds` by what it did, and not counting what that called under another name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seconds: Counter[str] = Counter()
        self._inside = 0.0
        for what, owner, methods in (
            ("bells", self.dispatch, ("on_doorbell", "admits", "arrived")),
            ("batches", self, ("_step",)),
            ("launches", self.gpu, ("launch", "launch_batch")),
            ("launches", self.dispatch.cohort, ("_launch",)),
            ("launches", self.engine, ("compute", "reply")),
            ("figures", self.ledger, ("ran", "launched", "answered_alone", "batched", "together", "answered")),
        ):
            for method in methods:
                setattr(owner, method, self._timed(what, getattr(owner, method)))

    def _timed(self, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            outside, self._inside, begun = self._inside, 0.0, time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                took = time.perf_counter() - begun
                self.seconds[what] += took - self._inside
                self._inside = outside + took

        return run


class TimedExecutor(symbiosis.Executor):
    server_class = TimedServer


class TimedServing(Serving):
    executor_class = TimedExecutor

    def spent(self) -> tuple[int, dict[str, float]]:
        """The calls of those who are here, and the seconds, until now."""
        server = self._executor.server
        assert isinstance(server, TimedServer)
        return sum(session.calls for session in list(server.sessions.values())), dict(server.seconds)


class Program:
    """A client of the executor at `endpoint`, or without one a program with a model of its own."""

    def __init__(
        self, endpoint: str | None, shape: Shape, device: str, lora: Lora = DEFAULT_LORA, exact: bool = True
    ) -> None:
        self._shape, self._device = shape, device
        with torch.device(device):  # both compute their rotary frequencies there
            model = symbiosis.from_executor(endpoint, device=device, exact=exact) if endpoint else shape.build(device)
        torch.manual_seed(5)
        targets = list(lora.targets if shape.family == "llama" else shape.attention)
        config = LoraConfig(r=lora.rank, target_modules=targets, init_lora_weights="gaussian")
        self._model = get_peft_model(model, config)
        self._first = {name: p.detach().clone() for name, p in self._model.named_parameters() if p.requires_grad}
        self._steps: dict[tuple[Job, bool], Callable[[], Any]] = {}
        self._rewind: dict[tuple[Job, bool], Callable[[], Any]] = {}

    def compile(self) -> None:
        """From now on all steps are of the compiled model."""
        self._model.forward = torch.compile(self._model.forward)

    def prepare(self, job: Job, captured: bool) -> None:
        """Everything is allocated, recorded and learned."""
        key = job, captured
        step, self._rewind[key] = (self._trainer if job.kind == "train" else self._decoder)(job)
        self._steps[key] = symbiosis.capture(step) if captured else step
        for _ in range(WARM_UP):
            self._steps[key]()
        synchronize(self._device)

    def _trainer(self, job: Job) -> tuple[Callable[[], Any], Callable[[], None]]:
        model, trained = self._model, [p for p in self._model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        cuda = self._device != "cpu"
        optimizer = torch.optim.AdamW(trained, lr=1e-4, capturable=cuda, foreach=cuda)
        ids = self._ids(job)

        def step() -> Tensor:
            model.train()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss

        return step, lambda: None

    @torch.no_grad()
    def _decoder(self, job: Job) -> tuple[Callable[[], Any], Callable[[], None]]:
        model, ids = self._model, self._ids(job)
        model.eval()
        cache = StaticCache(config=self._shape.config(), max_cache_len=job.length + TOKENS + 2 * WARM_UP)
        token = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        position = torch.full((1, 1), job.length, device=self._device)
        lengths = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "cumulative_length")]

        @torch.no_grad()
        def step() -> Tensor:
            model.eval()
            logits = model(input_ids=token, past_key_values=cache, use_cache=True, position_ids=position).logits
            token.copy_(logits[:, -1:].argmax(-1))
            position.add_(1)
            return token

        def rewind() -> None:
            position.fill_(job.length)
            for length in lengths:
                length.fill_(job.length)

        return step, rewind

    def _ids(self, job: Job) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, self._shape.vocabulary, (job.batch, job.length), generator=generator).to(self._device)

    def run(self, start: float, seconds: float, job: Job, captured: bool, steps: int = 1, early_s: float = 0.0) -> Pace:
        """At least so many steps from `start` on, until `seconds` are over; each is waited for, as who streams tokens does. Those that begin in
        the first `early_s` seconds come before that, and do not count."""
        step, rewind = self._steps[job, captured], self._rewind[job, captured]
        wait_for(start)
        early: list[float] = []
        took: list[float] = []
        first = begun = now = time.perf_counter()
        while now - begun < seconds or len(took) < steps:
            some = early if now - first < early_s else took
            if (len(early) + len(took)) % TOKENS == 0:
                rewind()
            step()
            synchronize(self._device)
            before, now = now, time.perf_counter()
            some.append(now - before)
            if some is early:
                begun = now
        return Pace(took, now - begun, early)

    def bits(self, job: Job, captured: bool, steps: int = 6) -> str:
        """A hash of what a job's first steps make, from the adapter as it was at first, with deterministic attention."""
        for name, parameter in self._model.named_parameters():
            if name in self._first:
                parameter.data.copy_(self._first[name])
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with sdpa_kernel(SDPBackend.MATH):  # the others add gradients in any order
                step, _ = (self._trainer if job.kind == "train" else self._decoder)(job)
                run = symbiosis.capture(step) if captured else step
                made = [run().detach().clone() for _ in range(steps)]
        finally:
            torch.use_deterministic_algorithms(False)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        return digest(torch.cat([one.detach().flatten().float() for one in (*made, *trained)]).cpu())

    def direct(self) -> tuple[int, int]:
        """Products that this program made by mapped weights, and calls."""
        figures = symbiosis.stats(self._model)
        return figures.direct, figures.calls

    def peak_bytes(self) -> int:
        """The most device memory that torch had in use."""
        return torch.cuda.max_memory_allocated() if self._device != "cpu" else 0

    def forget(self) -> None:
        """Let go of all jobs."""
        self._steps.clear()
        self._rewind.clear()
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Let go of the model."""
        self.forget()
        self._first.clear()
        del self._model
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def mean_batch(self) -> float:
        return symbiosis.stats(self._model).mean_batch


class Gauge:
    """How much memory of the device is in use, by whomever."""

    def __init__(self, device: str) -> None:
        self._device = device

    def used_bytes(self) -> int:
        if self._device == "cpu":
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def free_bytes(self) -> int:
        return 0 if self._device == "cpu" else torch.cuda.mem_get_info()[0]


class OneLayer:
    """Calls of a single layer of `width` × `width`, one after another."""

    CHAIN = 64

    def __init__(self, endpoint: str | None, width: int, device: str) -> None:
        self._device, self._width = device, width
        if device.startswith("cuda:"):
            torch.cuda.set_device(device)
        self._layer = square(width, device)
        if endpoint is not None:
            symbiosis.wrap(self._layer, endpoint)

    @torch.no_grad()
    def call_us(self, rows: int, captured: bool, rounds: int) -> float:
        """The median over the rounds of what a call of a chain takes."""
        x = torch.randn(rows, self._width, dtype=torch.bfloat16, device=self._device)

        def chain() -> Tensor:
            y = x
            with torch.no_grad():
                for _ in range(self.CHAIN):
                    y = self._layer(y)
            return y

        run = symbiosis.capture(chain) if captured else chain
        for _ in range(WARM_UP):
            run()
        times = []
        for _ in range(rounds):
            synchronize(self._device)
            begun = time.perf_counter()
            run()
            synchronize(self._device)
            times.append((time.perf_counter() - begun) / self.CHAIN)
        return statistics.median(times) * 1e6


class Products:
    """Products of one weight: of integers as private clients send them, and of floats."""

    TURNS = 20

    def __init__(self, inputs: int, outputs: int, device: str) -> None:
        self._device = device
        weight = torch.randn(inputs, outputs, dtype=torch.bfloat16, device=device)
        self._weights = {bits: quantise(weight, bits)[0] for bits in ROWS}
        self._float = weight

    def product_us(self, rows: int, bits: int | None, rounds: int) -> float:
        """The median over the rounds of what a product takes; `bits`: of the weights, or None for floats."""
        if bits is None:
            x, multiply, w = self._float[:1, :1].expand(rows, len(self._float)).contiguous(), torch.mm, self._float
        else:
            x = torch.randint(0, 1 << 30, (rows, len(self._float)), dtype=ROWS[bits], device=self._device)
            multiply, w = modular_product, self._weights[bits]
        times = []
        for _ in range(rounds + WARM_UP):
            synchronize(self._device)
            begun = time.perf_counter()
            for _ in range(self.TURNS):
                multiply(x, w)
            synchronize(self._device)
            times.append((time.perf_counter() - begun) / self.TURNS)
        return statistics.median(times[WARM_UP:]) * 1e6


class ServingOneLayer:
    """An executor of that layer."""

    def __init__(self, width: int, device: str, endpoints: list[str]) -> None:
        self._executor = symbiosis.Executor(square(width, device), listen=endpoints)

    def endpoints(self) -> list[str]:
        return self._executor.endpoints


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize()


def square(width: int, device: str) -> nn.Sequential:
    """A layer of the same weights on every device."""
    torch.manual_seed(0)
    layer = nn.Linear(width, width, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    return nn.Sequential(layer.to(device))
