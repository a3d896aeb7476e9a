"""Programs under `symbiosis run`: as they are, in processes of their own, compared with themselves without it."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from symbiosis.run.command import SITE
from tests.processes import Executor, killed_at_the_end, save_tiny_llama
from tests.serving_api import eventually

pytestmark = pytest.mark.timeout(300)  # the first one waits for the executor, too

TRAIN = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.manual_seed(3)
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM"))
rows = torch.randint(3, 100, (16, 12), generator=torch.Generator().manual_seed(7)).tolist()
options = dict(max_steps=3, learning_rate=1e-2, seed=11, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
Trainer(model, TrainingArguments(sys.argv[2], **options), train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
model.save_pretrained(sys.argv[2])
"""

LOAD = """
import sys
from transformers import AutoModelForCausalLM
for name in sys.argv[1:]: AutoModelForCausalLM.from_pretrained(name)
"""
# Each way to start Python, from a process that has not imported transformers; and the last from one that has.
START = """
import multiprocessing, os, runpy, subprocess, sys
if __name__ == "__main__":
    subprocess.run([sys.executable, "load.py", sys.argv[1]], check=True)
    for way in ("spawn", "forkserver", "fork"):
        if way == "fork":
            import transformers.modeling_utils
        child = multiprocessing.get_context(way).Process(target=runpy.run_path, args=("load.py",))
        child.start()
        child.join()
        assert child.exitcode == 0, way
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def endpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an executor whose weights programs map."""
    folder = tmp_path_factory.mktemp("executor")
    with killed_at_the_end() as processes:
        where = f"--listen=local://{folder}/executor.sock"
        executor = Executor(checkpoint, where, "--share-weights", log=folder / "log")
        processes.append(executor)
        yield executor.endpoint


def run(*command: object, folder: Path, options: tuple[str, ...] | None = (), **environment: str) -> Any:
    """A program to its end, under `symbiosis run OPTIONS`; with `options=None` without it."""
    launcher = [] if options is None else [sys.executable, "-m", "symbiosis", "run", *options, "--"]
    return subprocess.run(
        [*launcher, *map(str, command)], env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip


def adapter_of(folder: Path) -> dict[str, Any]:
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def written(folder: Path, **programs: str) -> None:
    for name, code in programs.items():
        (folder / f"{name}.py").write_text(code)


def shared_by(stderr: str) -> int:
    """How many models share."""
    return len(re.findall(r"symbiosis: checkpoint\d*: 14 of 15 layers from local:", stderr))


def test_a_program_trains_the_adapter_that_it_trains_alone(checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    written(tmp_path, train=TRAIN)
    command = (sys.executable, "train.py", checkpoint)
    alone = run(*command, "alone", folder=tmp_path, options=None)
    assert alone.returncode == 0 and "symbiosis" not in alone.stderr, alone.stderr
    split = run(*command, "split", folder=tmp_path, options=("--endpoint", endpoint, "--require"))
    assert split.returncode == 0 and shared_by(split.stderr) == 1, split.stderr
    expected, got = adapter_of(tmp_path / "alone"), adapter_of(tmp_path / "split")
    assert got.keys() == expected.keys() and all(got[name].equal(expected[name]) for name in expected)


@pytest.mark.full
def test_every_process_of_a_program_shares(checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    written(tmp_path, load=LOAD, start=START)
    done = run(sys.executable, "start.py", checkpoint, folder=tmp_path, options=("--endpoint", endpoint, "--require"))
    assert (done.returncode, shared_by(done.stderr)) == (0, 4), done.stderr


def torchrun(*program: object) -> tuple[Any, ...]:
    """Return what starts two processes of a program."""
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program)


@pytest.mark.full
def test_the_processes_of_torchrun_share(checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    written(tmp_path, load=LOAD)
    launch = torchrun("load.py", checkpoint)
    done = run(*launch, folder=tmp_path, options=None, SYMBIOSIS_RUN="1", SYMBIOSIS_ENDPOINT=endpoint, PYTHONPATH=SITE)
    assert (done.returncode, shared_by(done.stderr)) == (0, 2), done.stderr


FSDP = """
import sys, torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
torch.distributed.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.manual_seed(3)
model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM"))
for layer in model.base_model.model.model.layers: fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
losses = []
for _ in range(2):
    loss = model(input_ids=torch.arange(3, 9)[None], labels=torch.arange(3, 9)[None]).loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
open(f"{sys.argv[2]}-{torch.distributed.get_rank()}", "w").write(str(losses))
"""


@pytest.mark.full
def test_what_fsdp_takes_after_the_load_is_said(checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    """A program that calls `fully_shard` by itself, on CPUs: to the bit as unsplit, but with the base in its memory, so `--require` ends it."""
    written(tmp_path, train=FSDP)
    launch = torchrun("train.py", checkpoint)
    unsplit = run(*launch, "unsplit", folder=tmp_path, options=None)
    split = run(*launch, "split", folder=tmp_path, options=("--endpoint", endpoint))
    assert unsplit.returncode == split.returncode == 0, split.stderr
    for rank in (0, 1):
        assert (tmp_path / f"split-{rank}").read_text() == (tmp_path / f"unsplit-{rank}").read_text()
    assert split.stderr.count("is not shared: FSDP has divided its weights among processes") == 2, split.stderr
    done = run(*launch, "required", folder=tmp_path, options=("--endpoint", endpoint, "--require"))
    assert done.returncode != 0 and not (tmp_path / "required-0").exists() and "NotShared: " in done.stderr


@pytest.mark.full
def test_of_two_models_the_executors_is_shared(checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    written(tmp_path, load=LOAD)
    other = save_tiny_llama(tmp_path / "other", seed=1)
    done = run(sys.executable, "load.py", other, checkpoint, folder=tmp_path, options=("--endpoint", endpoint))
    assert (done.returncode, shared_by(done.stderr)) == (0, 1), done.stderr
    assert re.search("^symbiosis: other is not shared: .*weights", done.stderr, re.MULTILINE)
    options = ("--endpoint", endpoint, "--require")
    done = run(sys.executable, "load.py", other, checkpoint, folder=tmp_path, options=options)
    assert done.returncode == 1 and shared_by(done.stderr) == 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("symbiosis.errors.NotShared: other is not shared: ") and last.endswith(
        "(--require forbids that)"
    )


COMPUTE = """
import torch
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
open('loaded', 'w')
model(torch.arange(3, 9)[None])
open('computed', 'w')
"""


def test_a_dry_run_says_what_becomes_of_each_model(checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    """Policies and their references, reward models: all that is loaded before something is computed."""
    written(tmp_path, load=LOAD + COMPUTE)
    other, options = save_tiny_llama(tmp_path / "other", seed=1), ("--endpoint", endpoint, "--dry-run")
    done = run(sys.executable, "load.py", checkpoint, checkpoint, folder=tmp_path, options=options)
    (verdict,) = done.stdout.splitlines()  # of three that are the same
    assert done.returncode == 0 and re.fullmatch(rf"would share: {checkpoint.name}: 14 of 15 layers from {endpoint} \(.* not loaded\)", verdict)  # fmt: skip
    done = run(sys.executable, "load.py", checkpoint, other, folder=tmp_path, options=options)
    assert done.returncode == 1 and done.stdout.splitlines()[0] == verdict
    assert done.stdout.splitlines()[1].startswith("would not share: other is not shared: ")
    assert (tmp_path / "loaded").exists() and not (tmp_path / "computed").exists()
    done = run("sh", "-c", "exit 3", folder=tmp_path, options=options)
    text = "no verdict: it ended with 3 before it loaded a model of transformers\n"
    assert (done.returncode, done.stdout) == (1, text)


def test_a_dry_run_answers_programs_with_json(checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    """What the program itself prints goes elsewhere, so that standard output is the object alone."""
    written(tmp_path, load="print('mine')\n" + LOAD + COMPUTE)
    other, options = save_tiny_llama(tmp_path / "other", seed=1), ("--endpoint", endpoint, "--dry-run", "--json")
    done = run(sys.executable, "load.py", checkpoint, other, folder=tmp_path, options=options)
    found = json.loads(done.stdout)
    shares, alone = found.pop("models")
    assert (done.returncode, found) == (1, {"shares": False, "ended_with": None})
    not_loaded = shares.pop("bytes_not_loaded")
    assert 0 < not_loaded <= sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    told = {"model": checkpoint.name, "shares": True, "why": None, "endpoint": endpoint}
    assert shares == told | {"layers": 14, "all_layers": 15}
    assert "weights" in alone.pop("why")
    told = dict.fromkeys(("endpoint", "layers", "all_layers", "bytes_not_loaded"))
    assert alone == told | {"model": "other", "shares": False}
    done = run("sh", "-c", "exit 3", folder=tmp_path, options=options)
    assert (done.returncode, json.loads(done.stdout)) == (1, {"shares": False, "models": [], "ended_with": 3})


@pytest.mark.parametrize("options", [("--json",), ("--timeout", "3"), ("--dry-run", "--require")])
def test_options_that_would_say_nothing_are_refused(options: tuple[str, ...], tmp_path: Path) -> None:
    done = run("sh", "-c", "echo ran", folder=tmp_path, options=options)
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("error: "), done.stderr
    assert "--dry-run" in done.stderr


# A program of two sessions, neither of which ends by itself.
LASTS = "setsid sh -c 'echo $$ > other; exec sleep 300' & echo $$ > mine; exec sleep 300"


def is_running(folder: Path, name: str) -> bool:
    """Whether the process runs whose number is in this file."""
    try:
        return bool(Path(f"/proc/{int((folder / name).read_text())}/cmdline").read_bytes())  # a zombie has none
    except FileNotFoundError:
        return False


def test_a_dry_run_ends_all_that_it_has_started_when_its_time_is_over(tmp_path: Path) -> None:
    done = run("sh", "-c", LASTS, folder=tmp_path, options=("--dry-run", "--json", "--timeout", "2"))
    assert (done.returncode, json.loads(done.stdout)) == (1, {"shares": False, "models": [], "ended_with": None})
    assert "no model has computed within 2 s (--timeout)" in done.stderr
    assert not is_running(tmp_path, "mine") and not is_running(tmp_path, "other")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_dry_run_that_is_told_to_end_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("this signal is ignored here, as it is under nohup")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "symbiosis", "run", "--dry-run", "--", "sh", "-c", LASTS]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        try:
            eventually(
                lambda: all((tmp_path / name).is_file() and (tmp_path / name).read_text() for name in ("mine", "other"))
            )
            assert list(temporary.iterdir())
            process.send_signal(number), process.send_signal(number)  # as `timeout` does
            assert process.wait(30) == 128 + number
        finally:
            process.kill()
            left = [name for name in ("mine", "other") if is_running(tmp_path, name)]
            for name in left:
                os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)
    assert not left and not list(temporary.iterdir())


@pytest.mark.full
def test_a_package_that_is_too_old_is_said_in_a_line(checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    """What counts is the version that the package says it has."""
    written(tmp_path, load="import peft; peft.__version__ = '0.5.0'\n" + LOAD)
    done = run(sys.executable, "load.py", checkpoint, folder=tmp_path, options=("--endpoint", endpoint))
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert f"symbiosis: {checkpoint.name} is not shared: peft 0.5.0 is too old" in done.stderr
    done = run(sys.executable, "load.py", checkpoint, folder=tmp_path, options=("--endpoint", endpoint, "--require"))
    assert done.returncode == 1 and "NotShared: " in done.stderr.splitlines()[-1]


ENGINES = {  # classes where engines have them, which need a GPU
    "vllm": (
        "vllm/engine/arg_utils.py",
        "class EngineArgs:\n    model = 'Qwen/Qwen3-8B'\n    def create_engine_config(self): return 7\n",
        "from vllm.engine.arg_utils import EngineArgs; print(EngineArgs().create_engine_config())",
    ),
    "sglang": (
        "sglang/srt/server_args.py",
        "import msgspec\nclass ServerArgs(msgspec.Struct):\n    model_path: str\n    def __post_init__(self): pass\n    def resolve_once(self): return 7\n",
        "from sglang.srt.server_args import ServerArgs; print(ServerArgs('Qwen/Qwen3-8B').resolve_once())",
    ),
    "sglang of before": (
        "sglang/srt/server_args.py",
        "import dataclasses\n@dataclasses.dataclass\nclass ServerArgs:\n    model_path: str\n    def __post_init__(self): self.port = 7\n",
        "from sglang.srt.server_args import ServerArgs; print(ServerArgs('Qwen/Qwen3-8B').port)",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_of_its_own_is_told_of_ours(engine: str, tmp_path: Path) -> None:
    file, code, use = ENGINES[engine]
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(code)
    written(tmp_path, use=use)
    done = run(sys.executable, "use.py", folder=tmp_path)
    assert done.stdout == "7\n"
    assert f"Qwen3-8B is not shared: {engine.split()[0]} holds it by itself. `symbiosis serve`" in done.stderr
    done = run(sys.executable, "use.py", folder=tmp_path, options=("--require",))
    assert done.returncode == 1 and not done.stdout
    done = run(sys.executable, "use.py", folder=tmp_path, options=("--dry-run",))
    assert done.returncode == 1 and done.stdout.startswith("would not share: Qwen3-8B is not shared: ")


@pytest.mark.full
def test_a_program_goes_on_when_its_executor_comes_back(checkpoint: Path, tmp_path: Path) -> None:
    code = LOAD.replace("for name in sys.argv[1:]:", "model =").replace("(name)", "(sys.argv[1])")
    code += (
        "import torch\nfor line in sys.stdin: print(model(torch.arange(3, 9)[None]).logits.sum().item(), flush=True)"
    )
    written(tmp_path, compute=code)
    with killed_at_the_end() as processes:
        executor = Executor(checkpoint, f"--listen=local://{tmp_path}/e.sock", log=tmp_path / "log")
        processes.append(executor)
        command = [sys.executable, "-m", "symbiosis", "run", "--endpoint", executor.endpoint, "--require", "--"]
        command += [sys.executable, "compute.py", str(checkpoint)]
        with subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program:
            assert program.stdin and program.stdout
            sums = []
            for _ in range(2):
                program.stdin.write("once\n")
                program.stdin.flush()
                sums.append(program.stdout.readline())
                executor.kill()
                executor = executor.again()
                processes.append(executor)
            program.stdin.close()
            assert program.wait(60) == 0 and sums[0] and sums[0] == sums[1]


# ---------------------------------------------------------------- processes that load nothing


def test_exit_codes_and_signals_are_the_programs_own(tmp_path: Path) -> None:
    assert run("sh", "-c", "exit 7", folder=tmp_path).returncode == 7
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert run(sys.executable, "-c", code, folder=tmp_path).returncode == -signal.SIGTERM
    done = run("no-such-command", folder=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: there is no command 'no-such-command': write symbiosis run [OPTIONS] -- COMMAND ARGUMENTS\n")  # fmt: skip
    done = run("sh", folder=tmp_path, options=("--endpoint", "http://127.0.0.1:9400"))
    assert done.returncode == 2 and "is a web page" in done.stderr


def test_what_is_on_the_path_stays_there(tmp_path: Path) -> None:
    """Also a `sitecustomize`, which runs after the hook; but nothing is imported from where the command is given."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("import sys; sys.was = 'symbiosis.run.hook' in sys.modules")
    for name in ("symbiosis.py", "sitecustomize.py", "typer.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the working directory')")
    code = "import os, sys; print(sys.was, os.environ['PYTHONPATH'].split(':')[1:], 'sitecustomize' in sys.modules)"
    (tmp_path / "bin").mkdir()
    written(tmp_path / "bin", show=code)
    launcher = Path(sys.executable).with_name("symbiosis")
    command = [str(launcher), "run", sys.executable, "bin/show.py"]
    path = str(tmp_path / "path")
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout == f"True ['{path}'] True\n", done.stderr


def test_our_own_commands_do_not_share_what_they_serve(tmp_path: Path) -> None:
    code = "import os, sys; sys.argv = ['symbiosis', 'version']; from symbiosis.cli.main import main\ntry: main()\nfinally: print('SYMBIOSIS_RUN' in os.environ)"
    assert run(sys.executable, "-c", code, folder=tmp_path).stdout.splitlines()[-1] == "False"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without Symbiosis or anything else."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def test_a_python_without_symbiosis_is_reached(bare: Path, tmp_path: Path) -> None:
    """It says what is missing only when it loads a model."""
    folder = tmp_path / "transformers"
    folder.mkdir()
    code = "class PreTrainedModel:\n    @classmethod\n    def from_pretrained(cls, name): return 'loaded'"
    (folder / "modeling_utils.py").write_text(code)
    written(
        tmp_path, load="from transformers.modeling_utils import PreTrainedModel as M; print(M.from_pretrained('a/b'))"
    )
    done = run(bare, "load.py", folder=tmp_path)
    assert done.stdout == "loaded\n" and done.stderr.startswith("symbiosis: b is not shared: No module named ")
    assert run(bare, "load.py", folder=tmp_path, options=("--require",)).returncode == 1


def test_a_python_that_reads_no_path_is_refused(bare: Path, tmp_path: Path) -> None:
    done = run(bare, "-u", "-I", "-c", "print(1)", folder=tmp_path)
    assert done.returncode == 2 and "does not read PYTHONPATH" in done.stderr and not done.stdout


def test_a_process_that_imports_nothing_pays_for_nothing(tmp_path: Path) -> None:
    code = "import sys; print(*sys.modules)"
    plain = run(sys.executable, "-S", "-c", code, folder=tmp_path, options=None).stdout.split()
    hooked = run(sys.executable, "-c", code, folder=tmp_path).stdout.split()
    ours = {name for name in hooked if name.startswith("symbiosis")}
    assert ours == {"symbiosis", "symbiosis.run", "symbiosis.run.hook", "symbiosis.run.switch"}
    assert not {"torch", "transformers", "numpy", "msgspec", "typer"} & {*hooked} and plain


@pytest.mark.alone
def test_the_hook_takes_no_time(bare: Path, tmp_path: Path) -> None:
    """Less than 10 ms of a Python that starts."""
    times: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(15):
        for switch, taken in times.items():
            begun = time.perf_counter()
            environment = {**os.environ, "SYMBIOSIS_RUN": switch, "PYTHONPATH": SITE if switch == "1" else ""}
            subprocess.run([bare, "-c", "pass"], env=environment, cwd=tmp_path, check=True)
            taken.append(time.perf_counter() - begun)
    assert statistics.median(times["1"]) - statistics.median(times["0"]) < 0.010, times
