"""The scripts' reports: suites run to the end on a tiny model, bars are computed from what was measured, the last line is JSON.

Processes are threads here (how the scripts' processes start is tested with one suite); what is measured so says nothing.
"""

import importlib
import json
import math
import mmap
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from symbiosis.base.reporting import Report
from symbiosis.demo import data
from symbiosis.errors import ConfigError
from tests.conftest import tiny_llama
from tests.ranks import ranks_of

SCRIPTS = Path(__file__).parents[2] / "scripts"

pytestmark = pytest.mark.full  # commands of documents


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports one by its name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def last_line(text: str, name: str) -> Any:
    """What it reports for programs."""
    line = json.loads(text.splitlines()[-1])
    assert line.keys() == {"script", "figures", "bars", "versions"} and line["script"] == name
    assert all(bar.keys() == {"name", "value", "bar", "holds"} for bar in line["bars"])
    assert all(line["figures"][bar["name"]] == bar["value"] for bar in line["bars"])
    return line


class Worker:
    """As that of scripts/_processes.py, but a thread."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        self._kind, self._pool, self._last = kind, ThreadPoolExecutor(1), Future[Any]()
        self._thing: Any = None

    def begin(self, *args: Any) -> None:
        self._thing = self._pool.submit(self._kind, *args).result(60)
        self._last.set_result(None)

    def send(self, method: str, *args: Any) -> None:
        self._last = self._pool.submit(getattr(self._thing, method), *args)

    def result(self, timeout: float = 60.0) -> Any:
        return self._last.result(timeout)

    def call(self, method: str, *args: Any) -> Any:
        self.send(method, *args)
        return self.result()

    def hang_up(self) -> None:
        self._pool.shutdown()

    def end(self) -> None:
        self.hang_up()
        if executor := getattr(self._thing, "_executor", None):
            executor.close()


@contextmanager
def workers(kind: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[Worker]]:
    with idle_workers(kind, len(arguments)) as started:
        for worker, args in zip(started, arguments, strict=True):
            worker.begin(*args)
        yield started


@contextmanager
def idle_workers(kind: Callable[..., Any], count: int) -> Iterator[list[Worker]]:
    started = [Worker(kind) for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.end()


CALLS = {f"call_{way}_{rows}_eager_us" for way in ("no_executor", "local", "tcp") for rows in (1, 1024)}
POLICIES = {
    f"{p}_{what}" for p in ("immediate", "lockstep", "opportunistic") for what in ("tokens_per_s", "ms_per_token")
}
WANTED = {
    "call": CALLS,
    "decode": {*(f"decode_eager_ms_{side}" for side in ("split", "unsplit")), "decode_eager_over_eager"},
    "cost": {f"cost_{count}_decode_eager_{what}" for count in (1, 2) for what in ("us", "busy")},
    "fit": {"decode_fit_split", "decode_fit_unsplit_tokens_per_s", "decode_fit_ratio"},
    "long": {*(f"long_tiny_40_{name}_ms" for name in ("host", "offloaded", "on_gpu")), "long_tiny_40_token_ratio"},
    "many": {f"decode_{count}_tokens_per_s_{side}" for count in (1, 2) for side in ("split", "unsplit")},
    "policies": {*POLICIES, "policies_throughput_ratio", "policies_latency_ratio"},
}


@pytest.mark.full
@pytest.mark.parametrize("suite", WANTED)
def test_a_suite_of_the_gpu_benchmark(
    suite: str, script: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("bench_gpu")
    monkeypatch.setattr(bench, "workers", workers)
    monkeypatch.setattr(bench, "idle_workers", idle_workers)
    monkeypatch.setattr(bench, "prepare", lambda threads, once: None)  # settings of processes
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", suite, "--tiny", "--programs", "2", "--jobs", "decode"])
    assert bench.main() == 0
    figures = last_line(capsys.readouterr().out, "bench_gpu")["figures"]
    assert figures.keys() >= WANTED[suite]
    assert all(math.isfinite(figures[name]) and figures[name] > 0 for name in WANTED[suite])


@pytest.mark.full
def test_long_contexts(script: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_long.py", "--tiny", "--tokens", "300", "--times", "1", "--layers", "1"])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # a setting of processes
    assert script("bench_long").main() == 0
    figures = last_line(capsys.readouterr().out, "bench_long")["figures"]
    assert figures["token_float32_8_heads_host_ms"] > 0 and figures["float16_32_heads_gb_per_s"] > 0


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_suite_in_processes_of_its_own() -> None:
    command = [sys.executable, str(SCRIPTS / "bench_gpu.py"), "integers", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = last_line(done.stdout, "bench_gpu")["figures"]
    assert sum(name.startswith("integers_") for name in figures) == 8


@pytest.mark.full
def test_the_training_of_the_demo_model(
    script: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training, text = script("train_demo_model"), data.base_text()[:20_000]
    monkeypatch.setattr(data, "base_text", lambda: text)
    monkeypatch.setattr(data, "python_text", lambda: text)
    monkeypatch.setattr(sys, "argv", ["train_demo_model.py", "--steps", "1", "--out", str(tmp_path)])
    assert training.main() == 0
    figures = last_line(capsys.readouterr().out, "train_demo_model")["figures"]
    assert figures["steps"] == 1 and 1.0 < figures["loss"] < 10.0 and figures["text"].startswith("The statement ")
    assert (tmp_path / "model.safetensors").stat().st_size > figures["parameters"]


# ---------------------------------------------------------------- what the bars are made of


def holding(report: Any, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[float, bool]]:
    """The bars as they are printed; the exit status is what they say."""
    status = report.finish()
    bars = last_line(capsys.readouterr().out, report.script)["bars"]
    assert status == (0 if all(bar["holds"] for bar in bars) else 1)
    return {bar["name"]: (round(bar["value"], 6), bar["holds"]) for bar in bars}


@pytest.mark.parametrize(("local", "holds"), [(40.0, True), (50.0, False)])
def test_bars_of_calls(local: float, holds: bool, script: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """Of rounds that are compared each within itself: the machine's speed between them does not count."""
    bench = script("bench_call")
    p50 = {"bare": 20.0, "local": local, "tcp": 4 * local, "inproc": 1.0}
    rounds = {
        cell: [bench.Round(p50[cell.transport] + drift, 0.0, 0.0, 0.0) for drift in (0.0, 100.0, 0.0)]
        for cell in bench.CELLS
    }
    assert holding(bench.report(rounds), capsys) == {
        "local_8KB_over_bare_us": (local - 20.0, holds),
        "tcp_over_local_8KB": (4.0, True),
    }


@pytest.mark.parametrize(("mine", "holds"), [(12.0, True), (9.0, False)])
def test_bars_of_batching(mine: float, holds: bool, script: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy is held against the better of the two others."""
    bench = script("bench_batching")
    speeds = {"immediate": 5.0, "lockstep": 10.0, "opportunistic": mine}
    rounds = {policy: [bench.Round(speed, 1 / speed, 0.0, 0.0, 1.0)] * 2 for policy, speed in speeds.items()}
    found = holding(bench.report(rounds, SimpleNamespace(threads=1, executor_threads=1), 7), capsys)
    assert found == {
        "opportunistic_throughput_ratio": (mine / 10, holds),
        "opportunistic_latency_ratio": (round(10 / mine, 6), holds),
    }


@pytest.mark.parametrize(("p99", "kept", "holds"), [(5.0, 4.0, True), (5.1, 4.0, False), (5.0, 4.1, False)])
def test_bars_of_isolation(
    p99: float, kept: float, holds: bool, script: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("bench_isolation")
    rounds = {situation: [bench.Round(2.0, 1.0, 2.0, 1.5, 6.0, p99, 9.0, 0.5, 3)] * 3 for situation in bench.SITUATIONS}
    found = holding(bench.report(rounds, kept), capsys)
    assert found["flood_p50_over_alone"] == (3.0, True) and found["crowd_p99_over_alone"] == (p99, p99 <= 5.0)
    assert found["frozen_replies_kept"] == (kept, kept <= 4.0)
    assert all(held for _, held in found.values()) == holds


@pytest.mark.parametrize(("p50", "grown", "holds"), [(10.0, 512.0, True), (10.1, 512.0, False), (10.0, 513.0, False)])
def test_bars_of_strangers(
    p50: float, grown: float, holds: bool, script: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("bench_strangers")
    rounds = {situation: [bench.Round(2.0, 3.0, p50, 20.0, grown, 7)] * 3 for situation in bench.SITUATIONS}
    found = holding(bench.report(rounds), capsys)
    assert len(found) == 2 * len(bench.SITUATIONS)
    assert all(held for _, held in found.values()) == holds


@pytest.mark.parametrize(("loss_difference", "decode"), [(0.0, 3.0), (1e-3, 2.0)])
@pytest.mark.parametrize("called", [True, False])
def test_bars_of_steps(
    called: bool,
    loss_difference: float,
    decode: float,
    script: Callable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = script("bench_step")
    alone = bench.Alone(loss_difference=loss_difference)
    for what in ("train", "decode"):
        for side, seconds in (("split", [1.1, 2.2]), ("unsplit", [1.0, 2.0])):
            alone.seconds[what, side], alone.cpu[what, side] = seconds, seconds
    unsplit = bench.Crowd(10.0, 2.0, 4_000, 0, 0)
    split = bench.Crowd(9.0, decode, 1_000 + 30, 400 + 70, 100)  # three copies of 1,000 bytes fewer, a process more
    setting = bench.Setting(tmp_path, 1, 2, 2048, called, 1, 1.0, 1, 1.0, 1.0)
    found = holding(bench.report(setting, alone, {"split": [split], "unsplit": [unsplit]}, 250), capsys)
    assert found == {
        "loss_difference": (loss_difference, loss_difference == 0.0),
        "train_step_ratio": (1.1, called),
        "decode_step_ratio": (1.1, called),
        "four_memory_over_ideal": (round(1500 / 1100, 6), False),
        "four_decode_ratio": (decode / 2, decode >= 3.0),
        "four_train_ratio": (0.9, called),
    }


@pytest.mark.parametrize("kind", ["bit", "read", "SILENT", "ERROR"])
def test_bars_of_peft_methods(kind: str, script: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """A silent difference, or an error that is not ours, is a failure; a method that says why it cannot is none."""
    bench = script("compat_peft")
    outcomes = [bench.Outcome(bench.CASES[0], order, kind, "") for order in bench.ORDERS]
    found = holding(bench.report(outcomes, {}, False), capsys)
    assert found["silent"][1] == (kind != "SILENT") and found["errors_not_ours"][1] == (kind != "ERROR")


@pytest.mark.parametrize("kind", ["equal", "close", "refused", "unclear", "silent"])
def test_bars_of_generation(kind: str, script: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """A silent difference, or an error that is not ours, is a failure."""
    modes = script("compat_generation")
    found = holding(modes.report([modes.Outcome("llama", "none", "greedy", "called", kind)], []), capsys)
    assert found["silent"][1] == (kind != "silent") and found["unclear_errors"][1] == (kind != "unclear")
    assert not holding(modes.report([], []), capsys)["tried"][1]


@pytest.mark.parametrize(
    ("kind", "holds"), [("equal", True), ("refused", False), ("unclear", False), ("silent", False)]
)
def test_bars_of_suites(kind: str, holds: bool, script: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """Of ten tests one is refused where weights may be read, or fails; models with nothing to serve prove nothing."""
    suites = script("compat_suites")
    kinds = ["equal"] * 9 + [kind, "nothing to serve"]
    for way, other in (("reads", "mapped"), ("mapped", "reads")):
        equal = {"wrapped": {"kind": "equal"}, other: {"kind": "equal"}}
        results = [{"test": "x", **equal, way: {"kind": kind}} for kind in kinds]
        found = holding(suites.report([*results, {"test": "y", "not_here": "skipped"}]), capsys)
        assert found[f"{way}_tried"] == (10, True) and all(held for _, held in found.values()) == holds
        assert found[f"share_refused_with_{way}"] == ((0.1, False) if kind == "refused" else (0, True))
        assert not holding(suites.report([]), capsys)[f"{way}_tried"][1]


@pytest.mark.parametrize("wrong", ["", "adapter", "losses", "reads", "not shared", "memory", "slow", "failed"])
def test_bars_of_programs(wrong: str, script: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters and figures are compared; times and folders in them are not."""
    bench = script("compat_programs")
    sides = {}
    for side in ("unsplit", "split"):
        folder, differs = tmp_path / side / "out", side == "split"
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"1" if differs and wrong == "adapter" else b"0")
        state = {
            "log_history": [{"loss": 1.5 if differs and wrong == "losses" else 1.0, "train_runtime": 2.0 + differs}]
        }
        (folder / "trainer_state.json").write_text(json.dumps(state))
        sides[side] = bench.Run(tmp_path / side, first_step_s=4.0 if differs else 10.0, memory=130 if differs else 400)
    split = sides["split"]
    split.loaders |= {7} if wrong == "reads" else set()
    split.said += ["symbiosis: x is not shared: why"] if wrong == "not shared" else []
    split.memory += 100 if wrong == "memory" else 0
    split.first_step_s += 4.0 if wrong == "slow" else 0.0
    outcome = bench.Outcome("trl", "sft", sides["unsplit"], split, 100, "said" if wrong == "failed" else "")
    failing = {name for name, (_, holds) in holding(bench.report([outcome], 0, (8, 0)), capsys).items() if not holds}
    of = {"adapter": "jobs_that_differ", "losses": "jobs_that_differ", "reads": "processes_that_loaded_base_weights",
          "not shared": "processes_that_loaded_base_weights", "memory": "trl_memory_beyond_imports",
          "slow": "trl_first_step_ratio", "failed": "failed"}  # fmt: skip
    assert failing == ({of[wrong]} if wrong else set())
    assert not holding(bench.report([], 0, None), capsys)["jobs"][1]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_pefts_own_tests_on_split_models(script: Callable) -> None:
    suites = script("compat_suites")
    try:
        suites.suite(fetch=False)
    except ConfigError as error:
        pytest.skip(f"the source of PEFT is not here: {error}")
    command = [sys.executable, str(SCRIPTS / "compat_suites.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert last_line(done.stdout, "compat_suites")["figures"]["mapped_tried"] >= 10


@pytest.mark.parametrize("equal", [True, False])
def test_bars_of_architectures(equal: bool, script: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    bench, reporting = script("compat_models"), script("symbiosis.base.reporting")
    report = reporting.Report("compat_models")
    outcome = bench.Outcome("llama", equal={"forward": True, "step": equal}, covered=1.0)
    bench.summarise("causal", [outcome], report)
    found = holding(report, capsys)
    assert found["causal_forward_equal"] == (1, True) and found["causal_step_equal"] == (int(equal), equal)
    assert found["causal_mostly_served"] == (1, True)


# ---------------------------------------------------------------- plots

HIGH, LOW, LEVEL, FAR = (
    ("slow", 3.0, "<=", 2.0),
    ("fast", 1.0, "<=", 2.0),
    ("none", 0.0, "<=", 0.0),
    ("far", 50.0, ">=", 2.0),
)


def drawn(file: Path) -> list[tuple[str, float, str]]:
    """Names, lengths and colours of the rows of a plot, and its texts."""
    root = ElementTree.parse(file).getroot()
    rects = [(float(r.get("width", 0)), r.get("fill", "")) for r in root.findall("{*}rect") if r.get("x")]
    names = [text.text or "" for text in root.findall("{*}text") if text.get("text-anchor") == "end"]
    return [(name, *rect) for name, rect in zip(names, rects, strict=True)]


def test_a_report_is_plotted(
    script: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, made = script("plot_benchmarks"), Report("bench_<x>")
    for name, value, relation, bar in (HIGH, LOW, LEVEL, FAR):
        made.bar(name, value, relation, bar)  # type: ignore[arg-type]
    times, nothing = Report("bench"), Report("bench")
    times.figure("a_call_us", 10.0)
    times.figure("b_call_us", 1000.0)
    for name, report in (("bars", made), ("times", times), ("nothing", nothing)):
        report.finish(table=False)
        (tmp_path / f"{name}.json").write_text(capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", ["plot_benchmarks.py", *map(str, sorted(tmp_path.glob("*.json")))])
    assert plot.main() == 0
    figures = last_line(capsys.readouterr().out, "plot_benchmarks")["figures"]
    assert figures == {"bars.json": 4, "times.json": 2, "nothing.json": 0}
    width = float(plot.WIDTH)
    assert drawn(tmp_path / "bars.svg") == [
        ("slow", 0.75 * width, plot.FAILS),
        ("fast", 0.25 * width, plot.HOLDS),
        ("none", 0.0, plot.HOLDS),
        ("far", width, plot.HOLDS),
    ]
    text = (tmp_path / "bars.svg").read_text()
    assert "3 (≤ 2)" in text and "1 (≤ 2)" in text and "0 (= 0)" in text and "50 (≥ 2)" in text
    assert [length for _, length, _ in drawn(tmp_path / "times.svg")] == [round(width / 3, 1), width]
    assert not (tmp_path / "nothing.svg").exists()


def test_curves_are_plotted_over_their_numbers(
    script: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, report = script("plot_benchmarks"), Report("bench_<x>")
    for rows, ms in ((64, 1.0), (256, 10.0), (1024, 100.0)):
        report.figure(f"curve_rows_{rows}_engine_ms", ms)
        report.figure(f"curve_rows_{rows}_products_ms", ms / 10)
    report.finish(table=False)
    (tmp_path / "x.json").write_text(capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", ["plot_benchmarks.py", str(tmp_path / "x.json")])
    assert plot.main() == 0
    points = ElementTree.parse(tmp_path / "x-ms-over-rows.svg").getroot().findall("{*}circle")
    xs, ys = ([float(point.attrib[at]) for point in points] for at in ("cx", "cy"))
    assert xs[:3] == xs[3:] and xs[1] - xs[0] == xs[2] - xs[1] > 0
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2) and ys[3] > ys[0] > ys[1]  # lower is less


def test_the_plots_are_those_of_the_results(script: Callable) -> None:
    plot = script("plot_benchmarks")
    results = sorted(plot.RESULTS.glob("*.json"))
    for file in results:
        chart = plot.chart_of(file.stem, json.loads(file.read_text()))
        assert file.with_suffix(".svg").read_text() == plot.svg(chart), "run scripts/plot_benchmarks.py"
        assert f"({file.stem}.svg)" in (plot.RESULTS / "README.md").read_text()
    assert len(results) >= 12


@pytest.mark.parametrize(("slow", "heavy"), [(1.0, 1.0), (1.2, 1.0), (1.0, 1.5)])
def test_bars_of_shards(slow: float, heavy: float, script: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank holds its share, and a step takes no longer than at one executor."""
    bench = script("bench_shard")
    found = bench.sides(2)
    for side in found:
        several = side is not found[0]
        side.weights = [int(500 * heavy), 500] if several else [1000]
        side.others = [int(100 * heavy), 100] if several else [100]
        for what in bench.SHAPE:
            side.seconds[what] = [slow if several else 1.0]
    held = holding(bench.report(found, 2, 1000), capsys)
    assert {name: holds for name, (_, holds) in held.items()} == {
        **{f"{side}_{what}_over_one": slow == 1.0 for side in ("layers", "fsdp") for what in bench.SHAPE},
        **{f"{side}_weights_over_share": heavy == 1.0 for side in ("layers", "fsdp", "fsdp_spread")},
        **{f"{side}_other_memory_over_one": heavy == 1.0 for side in ("layers", "fsdp", "fsdp_spread")},
    }


@pytest.mark.full
def test_fsdp_jobs_train_at_once(script: Callable, tmp_path: Path) -> None:
    """Two processes that share a base; what they do is measured from one moment on. One that fails says why."""
    bench, gpu = script("_shard_trainers"), script("_gpu")
    job = gpu.Job("train", 2, 8)
    load = bench.Load(gpu.Shape(1, 64, 128, 2, 64), job, 0, ("cpu", "cpu"), 0.2)
    rate, memory = bench.by_fsdp(load, tmp_path, 1)
    done = json.loads((tmp_path / "fsdp1.0" / "done").read_text())
    assert rate == done["tokens_per_s"] > 0 and done["steps"] >= 2 and memory == []
    place = tmp_path / "wrong"
    impossible = load._replace(shape=load.shape._replace(heads=3))
    with bench.fsdp_job(impossible, place) as child, pytest.raises(RuntimeError, match="an FSDP job failed"):
        bench.until_all([place], "ready", [child])


def test_memory_of_a_process_is_told_apart(script: Callable) -> None:
    """Weights that it shares, all that is no file's, and nothing of its code."""
    bench, size = script("bench_shard"), 64 << 20
    weights, whole = bench.memory_of(os.getpid())
    with os.fdopen(os.memfd_create("symbiosis-weights-part"), "r+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as memory:
            for at in range(0, size, mmap.PAGESIZE):
                memory[at] = 1
            held, of_all = bench.memory_of(os.getpid())
    assert held - weights == size and abs(of_all - whole - size) < size / 4


@pytest.mark.full
def test_products_at_ranks_are_compared(script: Callable, tmp_path: Path) -> None:
    """With the model that they hold; with another one, all differ."""
    exact, url = script("shard_exact"), f"local://{tmp_path}/a.sock"
    with ranks_of(tiny_llama(), url, batch_invariant=True, allow_read=True):
        assert exact.random_products(url, tiny_llama(), 2, "layers", 40) == (40, 0)
        assert exact.random_products(url, tiny_llama().apply(_doubled), 2, "layers", 40) == (40, 40)


def _doubled(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Linear):
        module.weight.data *= 2


def test_bars_of_exact_serving(script: Callable) -> None:
    """A token that differs is found, and so is a log probability that is off."""
    exact = script("serve_exact")
    mine = [[exact.Token(1, -1.0), exact.Token(2, -2.0)], [exact.Token(3, -1.0)]]
    assert exact.compare(mine, [list(each) for each in mine]) == ([], 0.0)
    wrong, off = exact.compare(mine, [[exact.Token(1, -1.25), exact.Token(9, -7.0)], [exact.Token(3, -1.0)]])
    assert (wrong, off) == ([0], 0.25)
    wrong, _ = exact.compare(mine, [mine[0][:1], mine[1]])
    assert wrong == [0]


@pytest.mark.full
def test_an_adapter_is_published_in_milliseconds(
    script: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_rollout.py", "publish", "--tiny"])
    assert script("bench_rollout").main() == 0
    assert "publish_ms" in capsys.readouterr().out


def test_bars_of_exact_quantisation(script: Callable) -> None:
    """A value that differs is found."""
    exact = script("quantised_exact")
    a = [torch.ones(3), torch.zeros(2, 2)]
    b = [part.clone() for part in a]
    assert exact.differing(a, b) == 0
    b[0][1], b[1][1, 0] = 2.0, 1e-30
    assert exact.differing(a, b) == 2
    assert len(exact.WRITERS) >= 13 and len(exact.FAMILIES) == 6


@pytest.mark.parametrize("wrong", ["", "flat", "apart"])
def test_bars_of_tinkers_rl(
    wrong: str, script: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on from a supervised run. One that solves no more than before, or whose sampler is another one, has learned nothing."""
    compat = script("compat_tinker")
    asked = []

    def recipe(jobs: Any, job: str, name: str, **options: Any) -> list[dict[str, float]]:
        asked.append((name, options))
        (jobs.folder / job).mkdir(exist_ok=True)
        told = {"state_path": f"tinker://{job}", "sampler_path": f"tinker://{job}/sampler"}
        (jobs.folder / job / "checkpoints.jsonl").write_text(json.dumps(told))
        if name == "chat_sl":
            return []
        return [
            {
                "env/all/reward/total": 0.1 * step,
                "env/all/by_group/frac_mixed": 0.5,
                "optim/kl_sample_train_v1": -1e-3 if wrong == "apart" else 1e-7,
            }
            for step in range(6)
        ]

    def own(jobs: Any, job: str, *words: str, log: str) -> list[dict[str, float]]:
        assert (job, words) == ("solved", ("100", "tinker://beginner/sampler", "tinker://math_rl/sampler"))
        return [{"solved": 0.25}, {"solved": 0.25 if wrong == "flat" else 0.5}]

    monkeypatch.setattr(compat.Jobs, "recipe", recipe)
    monkeypatch.setattr(compat.Jobs, "own", own)
    report = compat.Report("compat_tinker")
    for _ in range(2):
        compat.learns(compat.Jobs(None, tmp_path, tmp_path, "http://nowhere"), "math_rl", report)
    assert [name for name, _ in asked] == ["chat_sl", "math_rl", "math_rl"]
    assert all(options["load_checkpoint_path"] == "tinker://beginner" for _, options in asked[1:])
    [first, *_] = [json.loads(line)["messages"] for line in Path(asked[0][1]["dataset"]).read_text().splitlines()]
    assert first[0]["content"] == "What is 4 + 5?" and first[1]["content"] == "9" and len(first) == 4
    x, y = map(int, re.findall(r"\d+", first[2]["content"]))
    assert int(first[3]["content"]) == x + y
    failing = {
        name.partition(": ")[2].partition(",")[0] for name, (_, holds) in holding(report, capsys).items() if not holds
    }
    assert (
        failing
        == {
            "": set(),
            "flat": {"problems solved"},
            "apart": {"kl_sample_train_v1"},
        }[wrong]
    )


def test_bars_of_exact_training(script: Callable) -> None:
    """Whatever is off, is found."""
    exact = script("train_exact")
    a, b = (torch.tensor([1.0, -4.0]) for _ in range(2))
    mine, alone = (exact.Trained([2.0], [each], {"lora_A": each.clone()}) for each in (a, b))
    assert exact.off(mine, alone) == (0, 0, 0)
    a[0], mine.adapter["lora_A"][1], mine.losses[0] = 2.0, -6.0, 2.5
    assert exact.off(mine, alone) == (0.25, 0.25, 0.5)


@pytest.mark.full
def test_the_server_beside_peft(
    script: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model, where the times say nothing; the answers are the same."""
    bench = script("bench_serve")
    monkeypatch.setattr(bench, "prepare", lambda threads: None)
    bench.main(["--cpu", "--quick", "--hidden", "128", "--layers", "1", "--threads", "1"])
    found = last_line(capsys.readouterr().out, "bench_serve")["figures"]
    assert found["different_requests"] == 0 and found["server_tokens_per_s"] > 0


@pytest.mark.full
def test_drafts_beside_none(
    script: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the demo model, as its own draft, where the times say nothing; texts are the same."""
    bench = script("bench_speculation")
    monkeypatch.setattr(bench, "prepare", lambda threads: None)
    bench.main(["--rounds", "1", "--tokens", "32", "--draft", str(bench.DEMO), "--streams", "1", "2"])
    found = last_line(capsys.readouterr().out, "bench_speculation")["figures"]
    for name in ("repetition_1", "repetition_2", "draft_1", "draft_2"):
        assert found[f"{name}_unlike_texts"] == 0 and found[f"{name}_ratio"] > 0 and found[f"{name}_accepted"] > 0.5


BARS_OF_LOADS = {
    "punica": {f"punica_{kind}_{what}" for kind in ("distinct", "uniform", "skewed", "identical") for what in ("tokens_per_s", "of_steps")}
    | {"distinct_over_peft_adapter_names", "distinct_over_transformers_batching"},
    "slora": {"S1_5_over_slora", "S1_many_of_few", "S1_satisfied_by_abort"},
    "cold": {"cold_host_over_warm", "cold_disk_over_warm"},
    "mixed": {"mixed_p50_over_alone", "mixed_p99_over_alone", "mixed_trainers_keep"},
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("load", BARS_OF_LOADS)
def test_loads_of_the_server(
    load: str, script: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tiny model on the CPU, where the times say nothing; every request is answered in full, and the exit status is that of the bars."""
    bench = script("bench_serve")
    monkeypatch.setattr(bench, "prepare", lambda threads: None)
    monkeypatch.setattr(importlib.import_module("_serve_loads"), "workers", workers)
    status = bench.main([load, "--tiny", "--threads", "1"])
    found = last_line(capsys.readouterr().out, f"bench_serve {load}")
    assert {bar["name"] for bar in found["bars"]} == BARS_OF_LOADS[load]
    assert all(bar["value"] > 0 or "abort" in bar["name"] for bar in found["bars"])
    assert status == (0 if all(bar["holds"] for bar in found["bars"]) else 1)


def test_the_loads_of_papers(script: Callable) -> None:
    """They are the same at every run, and what the papers say."""
    script("bench_serve")
    loads = importlib.import_module("_serve_loads")
    lengths = loads.lengths_like_sharegpt(1000, 1 << 20)
    means = [sum(each) / 1000 for each in zip(*lengths, strict=True)]
    assert lengths == loads.lengths_like_sharegpt(1000, 1 << 20)
    assert means == pytest.approx([161, 338], rel=0.15)
    kinds = {kind: loads.popularity(kind, 1000) for kind in ("distinct", "uniform", "skewed", "identical")}
    assert {kind: len(set(of)) for kind, of in kinds.items() if kind != "skewed"} == {"distinct": 1000, "uniform": 32, "identical": 1}  # fmt: skip
    most, next_to_it = sorted((kinds["skewed"].count(of) for of in set(kinds["skewed"])), reverse=True)[:2]
    assert most / next_to_it == pytest.approx(2**1.5, rel=0.25)
    asks = loads.gamma_arrivals(50.0, 40.0, ["a", "b"], 512)
    gaps = [after.at - before.at for before, after in zip(asks, asks[1:], strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.15)


def test_what_users_got_of_a_load(script: Callable) -> None:
    """Satisfaction falls with the square of the wait; a request that was refused, or cut off, satisfies nobody or counts for nothing."""
    script("bench_serve")
    loads = importlib.import_module("_serve_loads")
    told = [
        loads.Ask(1.0, 4, 2, None, [1.0, 2.0], loads.Finish.LENGTH),
        loads.Ask(0.0, 4, 2, None, [3.0, 4.0], loads.Finish.LENGTH),
        loads.Ask(0.0, 4, 2, None, [7.0], loads.Finish.CANCELLED),
        loads.Ask(0.0, 4, 2, None, [], loads.Finish.ABORTED),
    ]
    served = loads.Served.of(told, 2.0, 10.0)
    assert (served.requests_per_s, served.attainment) == (0.2, 0.5)
    assert served.satisfaction == pytest.approx((1.0 + 0.75) / 4)
    assert served.first_s == pytest.approx(10 / 3)


@pytest.mark.full
def test_the_simulated_cluster_makes_every_token(script: Callable[[str], ModuleType]) -> None:
    simulate = script("simulate_cluster")
    machine = simulate.Machine(0)
    machine.add(simulate.Request(1, 0.0, 64, 100, "a"), 0.0)
    step = simulate.WEIGHTS_S + simulate.PER_SEQUENCE_S
    alone = 64 * simulate.PROMPT_S + sum(step + simulate.PER_TOKEN_S * (64 + n) for n in range(100))
    assert machine.next_end() == (pytest.approx(alone, rel=1e-3), 1)
    found = {kind: simulate.run(kind, 4, simulate.requests_at(lambda _: 8.0, 8.0), 60.0) for kind in simulate.KINDS}
    for outcome in found.values():
        assert len(outcome.came) > 400 and all(each.produced == each.output for each in outcome.came)
    assert len({outcome.tokens_per_s for outcome in found.values()}) == 1
    assert found["punica"].gpus < 4 == found["round robin"].gpus


def test_functions_are_noted_while_a_path_is_recorded(script: Callable, tmp_path: Path) -> None:
    recorder = script("_recorder")
    code = f"""
import sys; sys.path.insert(0, {str(SCRIPTS)!r})
from pathlib import Path
from _recorder import Flag
from symbiosis.text import shown
flag = Flag(Path({str(tmp_path)!r}))
shown("before"); flag.record(3); shown("now"); shown("again"); flag.record(0); shown("after")
"""
    environment = {**os.environ, **recorder.environment(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    noted = list(recorder.Flag(tmp_path).noted())
    assert [(each.path, each.file, each.function) for each in noted] == [(3, "text.py", "shown")]


def test_what_a_newcomer_reads_is_counted(
    script: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["paths.py", "--static"])
    script("paths").main()
    figures = last_line(capsys.readouterr().out, "paths")["figures"]
    parts = ("an op", "a transport", "an option of the executor", "an option of an endpoint")
    assert all(figures[f"files besides its own: {part}"] > 0 for part in parts)
    assert all(figures[name] > 0 for name in ("files that mention an op", "words", "lines"))
    assert figures["words with several meanings"] == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", {"a <= b"}),
        ("a + b", {"a - b"}),
        ("a and b", {"a or b"}),
        ("not a", {"a"}),
        ("f(2, True)", {"f(3, True)", "f(2, False)"}),
    ],
)
def test_a_mutant_has_one_change(
    before: str, after: set[str], script: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module.py").write_text(before)
    monkeypatch.setattr(mutants := script("mutants"), "ROOT", tmp_path)
    found = [mutants.mutant_of("module.py", number) for number in range(mutants.count_of("module.py"))]
    assert {mutant.source for mutant in found} == after


def test_a_mutant_is_killed_and_the_module_itself_is_not() -> None:
    code = f"""
import os, sys; sys.path.insert(0, {str(SCRIPTS)!r})
from pathlib import Path
import mutants
file = "symbiosis/serving/kv_cache/page_pool.py"
source = Path(file).read_text()
wrong = source.replace("first < 0", "first <= 0", 1)
assert wrong != source
names = ["tests/unit/test_serving_blocks.py::test_a_run_of_pages_begins_at_the_first_that_is_free"]
for text, lives in ((source, True), (wrong, False)):
    mutant = mutants.Mutant(file, 1, "", "", frozenset(), frozenset(), text)
    assert (os.waitpid(mutants.forked(lambda: mutants.run(mutant, names)), 0)[1] == 0) is lives
"""
    subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS.parent, check=True, timeout=110)


def test_a_server_and_a_trainer_on_a_packed_base(script: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tiny model on the CPU: every token is made, and steps are, alone and together."""
    assert script("bench_large").main(["--tiny"]) == 0
    found = last_line(capsys.readouterr().out, "bench_large")["figures"]
    assert min(found[name] for name in ("tokens_per_s", "tokens_per_s_together", "step_ms_of_a_layer_together")) > 0
