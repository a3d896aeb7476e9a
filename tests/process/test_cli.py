"""Both commands: what they say of themselves, and that what a user gets wrong is a line, not a page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import symbiosis
from symbiosis.build import build
from tests import processes

MAIN = {
    "symbiosis": "import sys; sys.argv[0] = 'symbiosis'; from symbiosis.cli.main import main; main()",
    "symbiosis-executor": "import sys; sys.argv[0] = 'symbiosis-executor'; from symbiosis.cli.main import executor_main as m; m()",
}


def run(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", MAIN[words[0]], *words[1:]]
    path = f"{Path(symbiosis.__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    where = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=where)


@pytest.mark.parametrize("name", MAIN)
def test_the_version(name: str) -> None:
    done = run(name, "--version")
    assert (done.returncode, done.stdout.strip()) == (0, build())


@pytest.mark.parametrize("name", MAIN)
def test_completion_for_a_shell(name: str) -> None:
    variable = f"_{name.upper().replace('-', '_')}_COMPLETE"
    script = run(name, **{variable: "source_bash"}).stdout
    assert f"{variable}=complete_bash" in script and f"complete -o default -F _{name.replace('-', '_')}_completion" in script  # fmt: skip
    found = run(name, **{variable: "complete_bash", "COMP_WORDS": f"{name} --ver", "COMP_CWORD": "1"})
    assert found.stdout.split() == ["--version"]


WRONG = {
    "bench nope": "error: there is no benchmark 'nope': choose one of call, step, ",
    "bench": "Missing argument 'NAME'",
    "top http://127.0.0.1:9400/metrics": "is a web page, such as",
    "top tcp://127.0.0.1:99999": "is not an endpoint: write tcp://HOST:PORT with a port",
    "top /dev/null": "is not an endpoint",
    "top local:///dev/null": "error: no executor at local:///dev/null (/dev/null is not a socket). Start one with: ",
    "top --interval soon": "Invalid value for '--interval': ",
    "keygen": "Missing argument 'NAME'",
    "keygen a --expires soon": "error: ",
    "pads demo --tokens many -o y": "Invalid value for '--tokens': ",
    "pads demo --tokens 5": "Missing option '--output'",
    "nosuch": "No such command 'nosuch'",
    "keygen a -o /proc/x": "error: cannot make the folder /proc/x: ",
    "keygen a/b": "error: 'a/b' is not a valid key name",
    "pads demo --tokens 5 -o /proc/x/y": "error: there is no folder /proc/x",
    "pads demo --tokens 5 -o y --dtype float7": "error: --dtype 'float7' is not a floating-point type",
    "pads ./demo --tokens 5 -o y": "error: cannot load './demo': no such directory",
    "top local:///nowhere --once": "error: no executor at local:///nowhere",
    "top nonsense": "error: 'nonsense' is not an endpoint",
    "audit --level nope": "'nope' is not one of 'none', ",
    "audit --level split --bits 9": "error: weights are quantised to 8 or 16 bits",
    "demo --keep /proc/x": "error: cannot make the folder /proc/x: ",
    "demo --steps 0": "--steps",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_a_user_gets_wrong_is_a_line(words: str, tmp_path: Path) -> None:
    done = processes.run(*words.split(), folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    *usage, line = done.stderr.strip().splitlines()
    assert WRONG[words] in line and not any(mark in done.stderr for mark in "╭│╰")
    assert len(usage) <= 4 and line.lower().startswith("error: ")


def test_a_bug_shows_where_in_a_plain_traceback() -> None:
    code = "from symbiosis.cli import main as cli; cli.load_options = lambda *_: 1 / 0; import sys; sys.argv = ['x', 'demo']; cli.executor_main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and "ZeroDivisionError" in done.stderr
    assert "╭" not in done.stderr and len(done.stderr.splitlines()) < 60


def test_completion_in_an_editor_shows_what_is_public() -> None:
    code = "import symbiosis, sys; assert 'torch' not in sys.modules; print(*dir(symbiosis))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(symbiosis.__all__) | {"__version__"} <= set(done.stdout.split())


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_told_at_once(platform: str) -> None:
    code = f"import sys; sys.platform = {platform!r}; import symbiosis"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"ImportError: Symbiosis runs on Linux, and this is {platform}" in done.stderr.splitlines()[-1]
