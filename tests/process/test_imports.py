"""What a fresh interpreter loads and sees when it imports `symbiosis` or runs a command."""

import subprocess
import sys

import pytest

import symbiosis
from symbiosis.build import build
from symbiosis.executor.model.store import Store
from tests.conftest import tiny_llama
from tests.processes import Client, Say, killed_at_the_end

HEAVY = ("torch", "transformers", "peft", "numpy", "zmq", "accelerate", "starlette", "uvicorn")


def loaded_by(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after `code`."""
    report = f"import sys; print('loaded', *(name for name in {HEAVY} if name in sys.modules))"
    ending = f"\nfinally:\n    {report}"
    indented = "try:\n" + "".join(f"    {line}\n" for line in code.splitlines()) + "except SystemExit:\n    pass"
    done = subprocess.run([sys.executable, "-c", indented + ending], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "code",
    [
        "import symbiosis",
        "import symbiosis.cli.top, symbiosis.executor.observe.snapshot",
        "import sys; sys.argv = ['symbiosis', 'top', 'local:///nowhere']; from symbiosis.cli.main import main; main()",
        "import sys; sys.argv = ['symbiosis', 'bench', 'nosuch']; from symbiosis.cli.main import main; main()",
        "import symbiosis.protocol, symbiosis.executor.options, symbiosis.errors, symbiosis.executor.mps, symbiosis.cli.doctor, symbiosis.executor.preflight",
        "import sys; sys.argv = ['symbiosis-executor', '--help']; from symbiosis.cli.main import executor_main; executor_main()",
        "import sys; sys.argv = ['symbiosis', '--help']; from symbiosis.cli.main import main; main()",
        "import sys; sys.argv = ['symbiosis', 'serve', '--help']; from symbiosis.cli.main import main; main()",
        "import symbiosis.serving, symbiosis.serving.serve_options, symbiosis.server.launch.preflight",
        "import sys; sys.argv = ['symbiosis', 'version']; from symbiosis.cli.main import main; main()",
    ],
)
def test_help_and_import_load_nothing_heavy(code: str) -> None:
    assert loaded_by(code) == set()


def test_help_of_every_command_loads_nothing_heavy() -> None:
    code = (
        "from symbiosis.cli.main import app, executor_app\n"
        "for command in ('top', 'bench', 'keygen', 'pads', 'audit', 'doctor', 'demo'): app([command, '--help'], standalone_mode=False)\n"
        "executor_app(['--help'], standalone_mode=False)"
    )
    assert loaded_by(code) == set()


def test_the_check_for_heavy_packages_would_notice_one() -> None:
    assert "numpy" in loaded_by("import numpy")


@pytest.mark.full
def test_serving_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, symbiosis; assert 'symbiosis.serving' not in sys.modules; symbiosis.serving; assert 'torch' not in sys.modules; "
        "print(symbiosis.serving.Engine.__name__)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "Engine\n"


def has_imported_when_it_serves_integers(say: Say) -> tuple[bool, bool]:
    """Whether what grows seeds is there before and after."""
    needed = "cryptography.hazmat.primitives.ciphers.modes"
    before = needed in sys.modules
    Store(tiny_llama(), ("*",), (8,))
    return before, needed in sys.modules


def test_an_executor_that_serves_integers_can_grow_seeds_before_anybody_calls() -> None:
    """The first seed would make all others wait for an import."""
    with killed_at_the_end() as processes:
        client = Client(has_imported_when_it_serves_integers)
        processes.append(client)
        assert client.result() == (False, True)


def test_nothing_else_is_public() -> None:
    """In a fresh interpreter, where nobody has imported any submodule."""
    code = "import symbiosis, typing; print(*(n for n, v in vars(symbiosis).items() if v is not vars(typing).get(n)))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in names if not name.startswith("_")} - set(symbiosis.__all__)


def test_the_command_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "symbiosis", "version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == build()
