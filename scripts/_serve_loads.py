"""Loads of the server on a GPU: those of Punica and of S-LoRA, adapters that are not there yet, and trainers on the same executor.

Adapters are a few sets of random weights under many names: each name has a version and pages of its own, and is fetched by itself.
"""

import cProfile
import gc
import json
import pstats
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import numpy as np
import torch
from _processes import progress, together, wait_for, workers
from _punica import lengths_like_sharegpt, popularity
from _serve_gpu import RANK, Size, build
from safetensors.torch import save_file
from torch import Tensor, nn

from symbiosis.base.reporting import Report, print_table
from symbiosis.serving import Engine
from symbiosis.serving.lora.adapter import versions
from symbiosis.serving.lora.adapter_cache import place, shapes_of
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter, Part
from symbiosis.serving.request import Finish, Output, Request, Sampling

LATEST_S = 900.0
FIRST_TOKEN_S = 6.0  # after which a user of S-LoRA's experiments has given up
PREPARED_S = 60.0
ENDLESS = 1 << 50  # bytes: all names share a few weights
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Setting:
    """What is measured on what."""

    size: Size = Size()
    device: str = "cuda"
    quick: bool = False
    tiny: bool = False
    compiles: bool = False
    profiles: bool = False
    only: tuple[str, ...] = ()  # of what a load consists of; all, if empty
    seconds: float | None = None  # of a rate of S-LoRA's load, if said

    def wants(self, name: str) -> bool:
        return not self.only or name in self.only


@dataclass
class Ask:
    """One request, and what became of it; times in seconds from the beginning of the load."""

    at: float
    prompt: int
    length: int
    adapter: str | None
    times: list[float] = field(default_factory=list)  # of its tokens
    finish: Finish | None = None

    @property
    def first_s(self) -> float:
        """To its first token; for ever, if none came."""
        return self.times[0] - self.at if self.times else float("inf")


class Server:
    """An engine of a random model, with adapters of these ranks in turn under many names."""

    def __init__(
        self,
        setting: Setting,
        names: int,
        ranks: Sequence[int] = (RANK,),
        targets: Sequence[str] = PROJECTIONS,
        **options: Any,
    ) -> None:
        self.setting = setting
        fixed = {"max_waiting": 1 << 20, "adapter_memory": ENDLESS, "compiles": setting.compiles}
        options = {"max_batch": 32} | fixed | options
        self.batch: int = options["max_batch"]
        self.engine = Engine(build(setting.size, setting.device), memory=setting.size.memory, **options)
        self.served: Any = self.engine._served  # type: ignore[attr-defined]
        self.names = [f"adapter-{number}" for number in range(names)]
        sets = [_weights(self.served, rank, targets) for rank in ranks]
        for number, name in enumerate(self.names):
            adapter = LoadedAdapter(name=name, version=next(versions), **sets[number % len(sets)])
            self.engine._library._keep(adapter, None)  # type: ignore[attr-defined]
        self._next = 0

    def run(self, asks: Sequence[Ask], seconds: float | None = None) -> float:
        """Send each at its time; wait until all have ended, or for so long, and cancel the rest. The seconds that it took."""
        left, ended, begun = len(asks), Event(), time.perf_counter()
        first, self._next = self._next, self._next + len(asks)

        def on_output(ask: Ask, output: Output) -> None:
            nonlocal left
            ask.times += [time.perf_counter() - begun] * len(output.tokens)
            if output.finish is not None:
                ask.finish, left = output.finish, left - 1
                if not left:
                    ended.set()

        for number, ask in enumerate(asks):
            time.sleep(max(0.0, begun + ask.at - time.perf_counter()))
            self.engine.submit(self._request(first + number, ask), lambda output, ask=ask: on_output(ask, output))
        is_done = ended.wait(LATEST_S if seconds is None else max(0.0, begun + seconds - time.perf_counter()))
        took = time.perf_counter() - begun
        if not is_done:
            for number, ask in enumerate(asks):
                if ask.finish is None:
                    self.engine.cancel(first + number)
            ended.wait(LATEST_S)
        return took

    def warm_up(self) -> None:
        """Graphs are made, and kernels compiled: of steps of 1, 2, 4, ... sequences, and of prompts of about 1.5 times the one before,
        also beside sequences that decode."""
        counts = [*((1 << n for n in range(self.batch.bit_length() - 1)) if not self.setting.tiny else ()), self.batch]
        for count in counts:
            for names in ([None], self.names[:count] or [None]):
                self.run([Ask(0.0, 4, 8, names[number % len(names)]) for number in range(count)])
        for prompt in (7, 15, 31, 47, 63, 95, 127, 191, 255, 383, 511)[: 1 if self.setting.tiny else None]:
            for _ in range(3):
                self.run([Ask(0.0, prompt, 1, self.names[0] if self.names else None)])
        beside = [Ask(0.0, 4, 40, self.names[0] if self.names else None) for _ in range(self.batch - 1)]
        self.run([*beside, Ask(0.0, 4 if self.setting.tiny else 2600, 1, self.names[0] if self.names else None)])

    def _request(self, id: int, ask: Ask) -> Request:
        generator = np.random.default_rng(id)
        prompt = tuple(generator.integers(3, self.setting.size.vocabulary, ask.prompt).tolist())
        how = Sampling(max_tokens=ask.length, temperature=0.0, ignore_eos=True)
        return Request(id=id, prompt=prompt, adapter=ask.adapter, sampling=how)

    def close(self) -> None:
        self.engine.close(drain=False)
        self.__dict__.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def server(*arguments: Any, **options: Any) -> Iterator[Server]:
    made = Server(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def _weights(served: Any, rank: int, targets: Sequence[str]) -> dict[str, Any]:
    """What all adapters of this set have in common."""
    parts = {}
    for name, module in served.model.named_modules():
        if name.endswith(tuple(targets)):
            (N, K), like = module.weight.shape, {"dtype": served.dtype}
            parts[name] = Part(down=torch.randn(rank, K, **like) / K**0.5, up=torch.randn(rank, N, **like) * 0.01)
    size = sum(t.nbytes for part in parts.values() for t in part.tensors)
    packed = None if served.fetcher is None else served.fetcher.pack(parts)
    if packed is not None:
        parts = {name: part.to("meta") for name, part in parts.items()}
    pages = place(shapes_of(parts), served.arena.page_elements)[0] if packed is None else packed.layout.count
    return {"kind": "LORA", "rank": rank, "bytes": size, "parts": parts, "packed": packed, "pages": pages}


class StepTimes:
    """What the device takes for the steps of an engine, without all that is between them; and by kinds of steps, what the host does."""

    def __init__(self, served: Any) -> None:
        self._forward, self._on_gpu = served.forward, served.device.type == "cuda"
        self._steps: list[OneStep] = []
        served.forward = self._timed

    def _timed(self, step: Any) -> Tensor:
        one = OneStep(_kind(step), len(step.segments), time.perf_counter())
        if self._on_gpu:
            one.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            one.events[0].record()
        logits: Tensor = self._forward(step)
        if self._on_gpu:
            one.events[1].record()
        one.launched = time.perf_counter()
        self._steps.append(one)
        return logits

    def take(self, shows: str = "") -> float:
        """The seconds since the last time."""
        if self._on_gpu:
            torch.cuda.synchronize()
        steps, self._steps = self._steps, []
        if shows:
            self._show(shows, steps)
        return sum(step.device_s for step in steps)

    def _show(self, name: str, steps: "list[OneStep]") -> None:
        rows = []
        spans = [b.begun - a.begun for a, b in pairwise(steps)]
        for kind in sorted({step.kind for step in steps}):
            found = [(step, span) for step, span in zip(steps, spans, strict=False) if step.kind == kind]
            if found:
                means = [statistics.mean(values) * 1e3 for values in zip(*((span, s.device_s, s.launched - s.begun) for s, span in found), strict=True)]  # fmt: skip
                rows.append((kind, str(len(found)), f"{statistics.mean(s.sequences for s, _ in found):.1f}", *(f"{mean:.2f}" for mean in means)))  # fmt: skip
        print_table((name, "steps", "sequences", "ms from one to the next", "device ms", "ms to launch"), rows)


@dataclass
class OneStep:
    """When the host began to launch a step, and had launched it."""

    kind: str
    sequences: int
    begun: float
    launched: float = 0.0
    events: list[Any] = field(default_factory=list)

    @property
    def device_s(self) -> float:
        if not self.events:
            return self.launched - self.begun
        return float(self.events[0].elapsed_time(self.events[1])) / 1e3


def _kind(step: Any) -> str:
    """By its rows, up to the next power of two: all decode, or some are of prompts."""
    below = 1 << (step.rows - 1).bit_length()
    return f"decode {below:3d}" if step.rows == len(step.segments) else f"prompt {below:3d}"


# ---------------------------------------------------------------- Punica's load


def punica(report: Report, setting: Setting) -> None:
    distinct = _punica_paces(report, setting).get("distinct", 0.0)
    gc.collect()  # the server, before others need its memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for name, peer, times_faster in (
        ("peft_adapter_names", peft_adapter_names, 50.0),
        ("transformers_batching", transformers_batching, 4.0),
    ):
        if not setting.wants(name):
            continue
        progress(name)
        theirs = peer(setting)
        report.figure(f"{name}_tokens_per_s", theirs)
        report.bar(f"distinct_over_{name}", distinct / theirs, ">=", times_faster)
        gc.collect()


def _punica_paces(report: Report, setting: Setting) -> dict[str, float]:
    """Tokens a second, by the popularity of adapters."""
    count, longest = (12, 24) if setting.tiny else (400, 512) if setting.quick else (1000, 2048)
    lengths, rows, pace = lengths_like_sharegpt(count, longest), [], {}
    with server(setting, count) as ours:
        times = StepTimes(ours.served)
        ours.warm_up()
        for kind in filter(setting.wants, ("distinct", "uniform", "skewed", "identical")):
            progress(f"punica: {count} requests, {kind}")
            asks = [Ask(0.0, p, n, ours.names[of]) for (p, n), of in zip(lengths, popularity(kind, count), strict=True)]
            times.take()
            took, tokens = ours.run(asks), sum(length for _, length in lengths)
            of_steps = times.take(kind if setting.profiles else "") / took
            assert all(len(ask.times) == ask.length for ask in asks)
            pace[kind] = tokens / took
            rows.append((kind, f"{pace[kind]:,.0f}", f"{of_steps:.3f}", f"{took:.1f}"))
            report.bar(f"punica_{kind}_tokens_per_s", pace[kind], ">=", 3000.0)
            report.bar(f"punica_{kind}_of_steps", of_steps, ">=", 0.85)
    print_table(("Punica's load", "tokens/s", "of the steps alone", "s"), rows)
    return pace


def peft_adapter_names(setting: Setting) -> float:
    """Tokens a second of PEFT, decoding a batch of as many adapters; its prompts not counted."""
    from peft import LoraConfig, get_peft_model
    from transformers import StaticCache

    batch, context, steps = (3, 8, 2) if setting.tiny else (32, 512, 4)
    model: Any = build(setting.size, setting.device)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=RANK, target_modules=targets, init_lora_weights=False)
    adapted: Any = get_peft_model(model, config, adapter_name="0")
    for number in range(1, batch):
        adapted.add_adapter(str(number), LoraConfig(r=RANK, target_modules=targets, init_lora_weights=False))
    adapted = adapted.to(setting.device, next(model.parameters()).dtype).eval()
    cache = StaticCache(config=model.config, max_cache_len=context + 2 + steps)
    names = [str(number) for number in range(batch)]
    ids = torch.randint(3, setting.size.vocabulary, (batch, context), device=setting.device)
    with torch.inference_mode():
        adapted(input_ids=ids, past_key_values=cache, use_cache=True, adapter_names=names, logits_to_keep=1)
        took = []
        for step in range(1 + steps):
            position = torch.full((batch, 1), context + step, device=setting.device)
            begun = time.perf_counter()
            adapted(input_ids=ids[:, :1], position_ids=position, past_key_values=cache, use_cache=True, adapter_names=names).logits.sum().item()  # fmt: skip
            took.append(time.perf_counter() - begun)
    return batch / statistics.median(took[1:])


def transformers_batching(setting: Setting) -> float:
    """Tokens a second of transformers' own continuous batching of the base, without adapters; prompts counted, the start not."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    batch, prompt, length = (3, 8, 4) if setting.tiny else (32, 448, 128)
    model: Any = build(setting.size, setting.device)
    model.set_attn_implementation("paged|sdpa")
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, setting.size.vocabulary, (batch, prompt), generator=generator).tolist()
    how = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(num_blocks=2048, block_size=32, max_batch_tokens=4096)
    for each in (prompts[:2], prompts):
        begun = time.perf_counter()
        made = model.generate_batch(each, generation_config=how, continuous_batching_config=config, progress_bar=False)
        took = time.perf_counter() - begun
    return sum(len(one.generated_tokens) for one in made.values()) / took


# ---------------------------------------------------------------- S-LoRA's loads

S_LORA = {  # requests a second at an offered 10, by adapters
    "S1": {5: 8.05, 100: 7.99, 1000: 7.64, 2000: 7.61},
    "S2": {5: 7.48, 100: 7.29, 1000: 6.69, 2000: 6.73},
}
RANKS = {"S1": (8,), "S2": (64, 32, 16, 8)}
S_LORA_TARGETS = PROJECTIONS[:4]  # its adapters are of these


def gamma_arrivals(rate: float, seconds: float, adapters: Sequence[str], longest: int) -> list[Ask]:
    """Requests by a Gamma process whose gaps deviate as much as they last; lengths and adapters uniform."""
    generator, asks, at = np.random.default_rng(4), [], 0.0
    while (at := at + float(generator.gamma(1.0, 1.0 / rate))) < seconds:
        prompt, length, of = (int(generator.integers(low, high)) for low, high in ((8, longest), (8, longest), (0, len(adapters))))  # fmt: skip
        asks.append(Ask(at, prompt, length, adapters[of]))
    return asks


@dataclass(frozen=True)
class Served:
    """What came of a load."""

    rate: float
    requests_per_s: float
    first_s: float
    attainment: float
    satisfaction: float

    @classmethod
    def of(cls, asks: Sequence[Ask], rate: float, seconds: float) -> "Served":
        ended = [ask for ask in asks if ask.finish is Finish.LENGTH]
        first = [ask.first_s for ask in asks if ask.times]
        in_time = [1.0 - (ask.first_s / FIRST_TOKEN_S) ** 2 for ask in asks if ask.first_s <= FIRST_TOKEN_S]
        return cls(
            rate, len(ended) / seconds, statistics.mean(first or [float("inf")]), len(in_time) / len(asks),
            sum(in_time) / len(asks),
        )  # fmt: skip


def slora(report: Report, setting: Setting) -> None:
    settings = ("S1",) if setting.quick or setting.tiny else ("S1", "S2")
    rows: list[tuple[str, ...]] = []
    for name in filter(setting.wants, settings):
        counts = (5, 20) if setting.tiny else (5, 2000) if setting.quick else tuple(S_LORA[name])
        batch = 8 if setting.tiny else 128
        with server(
            setting, counts[-1], RANKS[name], S_LORA_TARGETS, max_batch=batch, first_token_s=FIRST_TOKEN_S
        ) as ours:
            ours.warm_up()
            rows += _with_counts(report, setting, name, counts, ours)
    print_table(("S-LoRA's load", "offered/s", "requests/s", "first token s", "attainment", "satisfaction"), rows)


def _with_counts(
    report: Report, setting: Setting, name: str, counts: Sequence[int], ours: Server
) -> list[tuple[str, ...]]:
    """Of the same adapters, the first few or all; and of all once more with early abort."""
    rows: list[tuple[str, ...]] = []
    rates = (20.0,) if setting.tiny else (30.0,) if setting.quick else (10.0, 20.0, 30.0, 40.0)
    best: dict[int, float] = {}
    for count in counts:
        loads = _under_load(setting, name, count, rates, ours)
        rows += [_row(f"{name}, {count} adapters", load) for load in loads]
        best[count] = max(load.requests_per_s for load in loads)
        report.figure(f"{name}_{count}_requests_per_s", best[count])
        report.figure(f"{name}_{count}_first_s", loads[0].first_s)
        if count in S_LORA[name]:
            report.bar(f"{name}_{count}_over_slora", best[count] / S_LORA[name][count], ">=", 1.0)
        last = loads[-1]
    report.bar(f"{name}_many_of_few", best[counts[-1]] / best[counts[0]], ">=", 0.95)
    scheduler: Any = ours.engine._scheduler  # type: ignore[attr-defined]
    scheduler.rules = replace(scheduler.rules, policy="abort")
    (early,) = _under_load(setting, name, counts[-1], (last.rate,), ours)
    report.bar(f"{name}_satisfied_by_abort", early.satisfaction - last.satisfaction, ">=", 0.0)
    return [*rows, _row(f"{name}, {counts[-1]} adapters, abort", early)]


def _under_load(setting: Setting, name: str, count: int, rates: Sequence[float], ours: Server) -> list[Served]:
    """Rates up to the first that is not kept up with."""
    usual, longest = (1.0, 24) if setting.tiny else (12.0, 512) if setting.quick else (120.0, 512)
    seconds = setting.seconds or usual
    found: list[Served] = []
    for rate in rates:
        progress(f"slora: {name}, {count} adapters, {rate:g} requests/s")
        asks = gamma_arrivals(rate, seconds, ours.names[:count], longest)
        took = ours.run(asks, seconds)
        found.append(Served.of(asks, rate, took))
        progress(f"{found[-1].requests_per_s:.2f} requests/s, first token after {found[-1].first_s:.2f} s")
        if found[-1].requests_per_s < 0.7 * rate:
            break
    return found


def _row(name: str, load: Served) -> tuple[str, ...]:
    return (name, f"{load.rate:g}", f"{load.requests_per_s:.2f}", f"{load.first_s:.2f}", f"{load.attainment:.2f}", f"{load.satisfaction:.2f}")  # fmt: skip


# ---------------------------------------------------------------- adapters that are not there yet


def cold(report: Report, setting: Setting) -> None:
    """The first token of an adapter that is on the device, in the host's memory, on disk (let go for another one), new on disk; in turns."""
    rounds, prompt = (1, 8) if setting.tiny else (5, 512) if setting.quick else (15, 512)
    times: dict[str, list[float]] = {"warm": [], "host": [], "disk": [], "new on disk": []}
    with TemporaryDirectory() as name, server(setting, 0, adapters=name) as ours:
        weights = _save_adapter(ours.served.model, Path(name) / "cold")
        shutil.copytree(weights.parent, Path(name) / "other")
        ours.engine._library._memory = weights.stat().st_size + (1 << 20)  # for one of them
        for _ in range(4):  # graphs
            ours.run([Ask(0.0, prompt, 2, "cold")])
        for number in range(rounds):
            progress(f"cold: round {number + 1} of {rounds}")
            for where, taken in times.items():
                if where == "new on disk":
                    weights.write_bytes(weights.read_bytes())  # another version, as far as the server knows
                if where in ("host", "disk"):
                    _evict(ours, "cold")
                if where == "disk":
                    ours.run([Ask(0.0, prompt, 2, "other")])
                ask = Ask(0.0, prompt, 2, "cold")
                with _profiled(setting.profiles and where == "disk" and number == rounds - 1):
                    ours.run([ask])
                taken.append(ask.first_s)
    middle = {where: statistics.median(taken) for where, taken in times.items()}
    print_table(("first token of an adapter", "ms"), [(where, f"{s * 1e3:.1f}") for where, s in middle.items()])
    report.figure("cold_warm_ms", middle["warm"] * 1e3)
    report.figure("cold_new_on_disk_ms", middle["new on disk"] * 1e3)
    report.bar("cold_host_over_warm", middle["host"] / middle["warm"], "<=", 1.1)
    report.bar("cold_disk_over_warm", middle["disk"] / middle["warm"], "<=", 1.5)


@contextmanager
def _profiled(shows: bool) -> Iterator[None]:
    """Tells what takes the time of this thread, which loads adapters."""
    if not shows:
        yield
        return
    with cProfile.Profile() as found:
        yield
    pstats.Stats(found).sort_stats("tottime").print_stats(14)


def _evict(ours: Server, name: str) -> None:
    """From the device, and wait until it is gone."""
    done = Event()
    engine: Any = ours.engine

    def evict() -> None:
        engine._residency.forget(engine._library.get(name).version)
        done.set()

    engine._loop.ask(evict)
    assert done.wait(LATEST_S)


def _save_adapter(model: nn.Module, folder: Path) -> Path:
    """As PEFT saves one; its file of weights."""
    from peft import LoraConfig

    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            (N, K), like = module.weight.shape, {"dtype": module.weight.dtype}
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, K, **like) / K**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(N, RANK, **like) * 0.01
    targets = sorted({name.split(".")[-3] for name in tensors})
    folder.mkdir()
    LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM").save_pretrained(folder)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == RANK
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder / "adapter_model.safetensors"


# ---------------------------------------------------------------- trainers beside it


class Streams:
    """An engine on an executor's model, and texts that it goes on with; lives in a process of its own."""

    def __init__(self, endpoint: str, device: str, memory: int, batch: int, prompt: int, length: int) -> None:
        import symbiosis

        model: Any = symbiosis.from_executor(endpoint, device=device, priority="decode")
        self._engine = Engine(model, memory=memory, max_batch=batch)
        self._vocabulary = self._engine.vocabulary
        self._batch, self._prompt, self._length = batch, prompt, length
        self._next = 0
        self._error: str | None = None

    def prepare(self) -> float:
        """Go on until all have said some tokens: graphs are made, and kernels compiled. The seconds that it took."""
        begun, said = time.monotonic(), Counter[int]()
        while time.monotonic() < begun + PREPARED_S:
            said = Counter(self._gaps_of(time.monotonic(), 2.0, lambda id: id))
            if len(said) >= self._batch and min(said.values()) >= 20:
                return time.monotonic() - begun
        raise RuntimeError(
            f"after {PREPARED_S} s {len(said)} of {self._batch} streams speak, {sum(said.values())} tokens in the last"
        )

    def run(self, start: float, seconds: float) -> list[float]:
        """The gaps between the tokens of all streams, from `start` on."""
        return self._gaps_of(start, seconds)

    def _gaps_of(self, start: float, seconds: float, what: Callable[[int], Any] | None = None) -> list[Any]:
        """The gaps, or what each token's request makes `what` of."""
        wait_for(start)
        before: dict[int, float] = {}
        gaps: list[Any] = []
        end = time.perf_counter() + seconds

        def on_output(output: Output) -> None:
            now = time.perf_counter()
            if output.tokens and output.request in before:
                gaps.append(now - before[output.request] if what is None else what(output.request))
            before[output.request] = now
            if output.finish is Finish.ERROR:
                self._error = output.error
            elif output.finish is not None and now < end:
                self._submit(on_output)

        mine = [self._submit(on_output) for _ in range(self._batch)]
        time.sleep(max(0.0, end - time.perf_counter()))
        for id in range(mine[0], self._next):
            self._engine.cancel(id)
        time.sleep(0.2)
        if self._error is not None:
            raise RuntimeError(f"a stream ended: {self._error}")
        return gaps

    def close(self) -> None:
        self._engine.close(drain=False)

    def _submit(self, on_output: Callable[[Output], None]) -> int:
        id, self._next = self._next, self._next + 1
        prompt = tuple(np.random.default_rng(id).integers(3, self._vocabulary, self._prompt).tolist())
        how = Sampling(max_tokens=self._length, temperature=0.0, ignore_eos=True)
        self._engine.submit(Request(id=id, prompt=prompt, sampling=how), on_output)
        return id


def mixed(report: Report, setting: Setting) -> None:
    """32 streams and two trainers of 2 x 512 on one executor, each alone and both together."""
    from _gpu import Job, Program, Serving, Shape

    size, tiny = setting.size, setting.tiny
    shape = Shape(size.layers, size.hidden, size.inner, size.heads, size.vocabulary)
    seconds = 0.8 if tiny else 6.0 if setting.quick else 20.0
    batch, prompt, length = (4, 8, 64) if tiny else (32, 256, 1024)
    job = Job("train", 2, 16 if tiny else 512)
    with TemporaryDirectory() as folder:
        endpoint = f"local://{folder}/executor.sock"
        given = [(shape, setting.device, endpoint, {})]
        with workers(Serving, given):
            memory = size.memory // 2
            with (
                workers(Streams, [(endpoint, setting.device, memory, batch, prompt, length)]) as streams,
                workers(Program, [(endpoint, shape, setting.device)] * 2) as trainers,
            ):
                progress("mixed: all are there")
                for trainer in trainers:
                    trainer.call("prepare", job, not tiny)
                progress("mixed: trainers have run")
                progress(f"mixed: streams speak after {streams[0].call('prepare'):.1f} s")
                progress("mixed: streams alone")
                (alone,) = together(streams, "run", seconds)
                progress("mixed: trainers alone")
                trained = together(trainers, "run", seconds, job, not tiny)
                progress("mixed: together")
                streams[0].send("run", time.monotonic() + 0.3, seconds)
                beside = together(trainers, "run", seconds, job, not tiny)
                both = streams[0].result()
                streams[0].call("close")
    _judge_mixed(report, alone, both, *(sum(len(pace.steps) / pace.elapsed for pace in each) for each in (trained, beside)))  # fmt: skip


def _judge_mixed(report: Report, alone: list[float], both: list[float], trained: float, beside: float) -> None:
    rows = []
    for name, share, most in (("p50", 50, 1.25), ("p99", 99, 2.0)):
        a, b = (float(np.percentile(gaps, share)) for gaps in (alone, both))
        rows.append((f"between tokens, {name}, ms", f"{a * 1e3:.2f}", f"{b * 1e3:.2f}", f"{b / a:.2f}"))
        report.figure(f"mixed_{name}_alone_ms", a * 1e3)
        report.bar(f"mixed_{name}_over_alone", b / a, "<=", most)
    rows.append(("trainers' steps/s", f"{trained:.2f}", f"{beside:.2f}", f"{beside / trained:.2f}"))
    report.bar("mixed_trainers_keep", beside / trained, ">=", 0.25)
    print_table(("", "alone", "together", "ratio"), rows)


LOADS: dict[str, Callable[[Report, Setting], None]] = {"punica": punica, "slora": slora, "cold": cold, "mixed": mixed}
