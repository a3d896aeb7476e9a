"""What `bench_shard.py --trainers` and `--clients` measure: LoRA programs on a base that several devices hold, against as many FSDP jobs as are
wanted there, or on other devices than the base."""

import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _gpu import ATTENTION, Job, Program, Shape
from _processes import Worker, executor, idle_workers, progress, together

import symbiosis
from symbiosis.base.procs import python
from symbiosis.base.reporting import Report, print_table
from symbiosis.transport.cuda.peer import device_name

PAPER, AIM = 4.0, 8.0  # times the throughput of FSDP
ONE_BAR = 1.15  # of a step of one trainer alone, over that at one executor
WAIT_S = 240.0
HERE = Path(__file__).parent


class Load(NamedTuple):
    """The base, what each program does, how many there are, and on which devices. `homes`: of the programs, if they are not those of the base."""

    shape: Shape
    job: Job
    programs: int
    devices: tuple[str, ...]
    seconds: float
    homes: tuple[str, ...] = ()
    fsdp_jobs: tuple[int, ...] = (1, 2, 4)  # at once: the best of those of these counts that fit

    @property
    def is_cuda(self) -> bool:
        return self.devices[0] != "cpu"


def llama_13b(layers: int, gpus: Sequence[int], seconds: float) -> Load:
    """Eight trainers on a base with so many of Llama-13B's layers."""
    shape = Shape(layers=layers, hidden=5120, inner=13824, heads=40)
    return Load(shape, Job("train", 2, 512), 8, named(gpus), seconds)


def gemma_27b(layers: int, gpus: Sequence[int], homes: Sequence[int], seconds: float) -> Load:
    """Four programs, on GPUs of their own, on a base with so many of Gemma2-27B's layers."""
    others = (("num_key_value_heads", 16), ("head_dim", 128))
    shape = Shape(layers, 4608, 36864, 32, 256000, "gemma2", others)
    return Load(shape, Job("train", 2, 512), 4, named(gpus), seconds, named(homes))


def named(gpus: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"cuda:{gpu}" for gpu in gpus)


class Tenant(Program):
    """A LoRA program on one of the devices."""

    def __init__(self, endpoint: str, shape: Shape, device: str) -> None:
        if device != "cpu":
            torch.cuda.set_device(device)
        super().__init__(endpoint, shape, device)

    def called(self) -> tuple[int, int]:
        """How many calls it has made, and how many ran in the products of these."""
        stats = symbiosis.stats(self._model)
        return stats.calls, stats.batched_calls


def used_bytes(devices: Sequence[str]) -> list[int]:
    """The memory of each device that is in use, by whomever."""
    query = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    used = dict(line.split(", ") for line in said.splitlines())
    return [int(used[uuid_of(device)]) << 20 for device in devices]


def uuid_of(device: str) -> str:
    """What the driver's tools and CUDA_VISIBLE_DEVICES call a GPU."""
    return f"GPU-{device_name(torch.device(device))}"


class Found(NamedTuple):
    """Tokens a second of all programs together, the seconds of a step of one alone, the memory of each device that was in use, and how many calls of
    all together were one product, at the mean; 0 if there were none."""

    rate: float
    alone_s: float
    memory: list[int]
    joined: float


def measure(load: Load, ways: dict[str, tuple[str, ...]]) -> Report:
    """The throughput of split trainers at a service laid out in each of these ways, that of FSDP jobs, and a step of one trainer beside that
    at one executor.

    Args:
        ways: The executor's options, by name.
    """
    made, rows = Report("bench_shard_trainers"), []
    rates: dict[str, float] = {}
    with saved(load) as folder:
        with crowd_at(load._replace(programs=1), folder, (f"--device={load.devices[0]}", "--share-weights")) as crowd:
            one = split(load, crowd)
        for name, options in ways.items():
            with crowd_at(load, folder, options) as crowd:
                rates[name], alone_s, memory, _ = split(load, crowd)
            rows.append((name, f"{rates[name]:.0f}", gib(memory)))
            made.figure(f"{name}_tokens_per_s".replace(" ", "_"), round(rates[name], 1))
            made.figure(f"{name}_gib".replace(" ", "_"), gib(memory))
            made.bar(f"{name}_step_over_one".replace(" ", "_"), round(alone_s / one.alone_s, 3), "<=", ONE_BAR)
        found: dict[int, float] = {}
        for count in load.fsdp_jobs:
            if found and load.is_cuda and not there_is_room(load.devices, max(memory) * count // max(found)):
                break
            found[count], memory = by_fsdp(load, folder, count)
            rows.append((f"FSDP, {count} jobs", f"{found[count]:.0f}", gib(memory)))
            made.figure(f"fsdp_{count}_jobs_tokens_per_s", round(found[count], 1))
            made.figure(f"fsdp_{count}_jobs_gib", gib(memory))
    print_table((f"{load.programs} trainers, {load.job.batch} × {load.job.length}", "tokens/s", "GiB a GPU"), rows)
    made.figure("layers", load.shape.layers)
    made.figure("aim", AIM)
    made.bar("trainers_over_fsdp", round(max(rates.values()) / max(found.values()), 3), ">=", PAPER)
    return made


def there_is_room(devices: Sequence[str], nbytes: int) -> bool:
    """Whether each of these GPUs has so much memory."""
    return all(nbytes < torch.cuda.get_device_properties(device).total_memory for device in devices)


def gib(memory: Sequence[int]) -> str:
    return " ".join(f"{nbytes / 2**30:.1f}" for nbytes in memory)


def measure_elsewhere(load: Load, jobs: Sequence[Job], ways: dict[str, tuple[str, ...]]) -> Report:
    """What programs that are on other devices than the base do of each job, one alone and all together, at a service laid out in each of these
    ways."""
    made, rows = Report("bench_shard_elsewhere"), []
    with saved(load) as folder:
        for name, options in ways.items():
            with crowd_at(load, folder, options) as crowd:
                for job in jobs:
                    rate, alone_s, memory, joined = split(load._replace(job=job), crowd)
                    what = f"{job.kind} {job.batch} × {job.length}"
                    rows.append((
                        name, what, f"{1e3 * alone_s:.1f}", f"{job.tokens / alone_s:.0f}", f"{rate:.0f}", f"{joined:.2f}", gib(memory),
                    ))  # fmt: skip
                    key = f"{name}_{job.kind}_{job.batch}x{job.length}".replace(" ", "_")
                    made.figure(f"{key}_alone_ms", round(1e3 * alone_s, 2))
                    made.figure(f"{key}_tokens_per_s", round(rate, 1))
                    made.figure(f"{key}_calls_a_product", round(joined, 2))
                    made.figure(f"{key}_gib", gib(memory))
    columns = (
        "held by", "each of them", "one alone, ms", "tokens/s", f"{load.programs} together", "calls a product", "GiB a GPU",
    )  # fmt: skip
    print_table(columns, rows)
    made.figure("layers", load.shape.layers)
    made.figure("programs", load.programs)
    return made


@contextmanager
def saved(load: Load) -> Iterator[Path]:
    """A folder in which the base lies as `model`; gone when this ends."""
    with tempfile.TemporaryDirectory() as folder:
        load.shape.build(load.devices[0]).save_pretrained(Path(folder) / "model")
        gc.collect()
        if load.is_cuda:
            torch.cuda.empty_cache()
        yield Path(folder)


@contextmanager
def crowd_at(load: Load, folder: Path, options: tuple[str, ...]) -> Iterator[list[Worker]]:
    """Programs, each on its device, that have joined a service which is started with these options."""
    url = f"local://{folder}/{time.monotonic_ns()}.sock"
    homes = load.homes or load.devices
    with ExitStack() as stack:
        crowd: list[Worker] = stack.enter_context(idle_workers(Tenant, load.programs))
        stack.enter_context(executor(folder / "model", 1, f"--listen={url}", *options))
        progress("the base is served")
        for number, worker in enumerate(crowd):
            worker.begin(url, load.shape, homes[number % len(homes)])
        for worker in crowd:
            worker.result()
        yield crowd


def split(load: Load, crowd: Sequence[Worker]) -> Found:
    """What they do of the job together; the first one also alone."""
    for worker in crowd:
        worker.send("prepare", load.job, load.is_cuda)
    for worker in crowd:
        worker.result()
    progress("programs are ready")
    together(crowd, "run", 1.0, load.job, load.is_cuda)
    alone = together(crowd[:1], "run", load.seconds / 2, load.job, load.is_cuda)[0]
    before = [worker.call("called") for worker in crowd]
    paces = together(crowd, "run", load.seconds, load.job, load.is_cuda)
    made = [np.subtract(worker.call("called"), then) for worker, then in zip(crowd, before, strict=True)]
    calls, batched = np.sum(made, axis=0)
    memory = used_bytes(load.devices + load.homes) if load.is_cuda else []
    rate = sum(load.job.tokens * len(pace.steps) / pace.elapsed for pace in paces)
    alone_s = statistics.median(alone.steps)
    progress(f"{rate:.0f} tokens/s; one alone takes {1e3 * alone_s:.1f} ms a step")
    return Found(rate, alone_s, memory, float(batched / calls) if calls else 0.0)


def by_fsdp(load: Load, folder: Path, count: int) -> tuple[float, list[int]]:
    """Tokens a second of so many FSDP jobs at once, each of which is on all devices, and the memory that is in use then."""
    places = [folder / f"fsdp{count}.{number}" for number in range(count)]
    with ExitStack() as stack:
        children = [stack.enter_context(fsdp_job(load, place)) for place in places]
        until_all(places, "ready", children)
        for place in places:
            (place / "go").touch()
        time.sleep(load.seconds / 2)
        memory = used_bytes(load.devices) if load.is_cuda else []
        until_all(places, "done", children)
    rate = sum(json.loads((place / "done").read_text())["tokens_per_s"] for place in places)
    progress(f"{count} FSDP jobs: {rate:.0f} tokens/s")
    return rate, memory


@contextmanager
def fsdp_job(load: Load, place: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Torchrun with a process for each device; gone when this ends."""
    place.mkdir()
    shape = {name: getattr(load.shape, name) for name in ("layers", "hidden", "inner", "heads", "vocabulary")}
    job: dict[str, Any] = {
        "device": "cuda" if load.is_cuda else "cpu", "shape": shape, "targets": list(ATTENTION), "batch": load.job.batch,
        "length": load.job.length, "seconds": load.seconds,
    }  # fmt: skip
    (place / "job.json").write_text(json.dumps(job))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(map(uuid_of, load.devices))} if load.is_cuda else {})
    words = python("-m", "torch.distributed.run", "--standalone", f"--log-dir={place}", f"--nproc-per-node={len(load.devices)}")  # fmt: skip
    with (place / "log").open("wb") as log:
        child = subprocess.Popen(
            [*words, str(HERE / "_shard_fsdp.py"), str(place / "job.json")],
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def until_all(places: Sequence[Path], name: str, children: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Wait until every job has made this file; raise what one says that has failed."""
    end = time.monotonic() + WAIT_S
    while not all((place / name).exists() for place in places):
        for place, child in zip(places, children, strict=True):
            if child.poll():
                raise RuntimeError(f"an FSDP job failed:\n{(place / 'log').read_text()[-3000:]}")
        if time.monotonic() > end:
            raise TimeoutError(f"FSDP jobs were not {name} within {WAIT_S:g} s")
        time.sleep(0.05)
