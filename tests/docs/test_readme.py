"""What the README and docs/usage.md show exists, and reads as the code does: programs, signatures, options, paths, make targets, commands."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import symbiosis
from symbiosis.cli.main import BENCHMARKS, app, executor_app
from tests.processes import run

ROOT = Path(__file__).parents[2]
README = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/usage.md"))
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
PROSE = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
SPANS = re.findall(r"`([^`]+)`", PROSE)
SHOWN = [line for language, text in BLOCKS if language != "python" for line in text.splitlines()] + SPANS
API = [
    call
    for row in re.findall(r"^\| (.*?\(.*?) \| ", PROSE, re.MULTILINE)
    for call in re.findall(r"`([A-Za-z_]+\([^`]*\))`", row)
]
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_compile(program: str) -> None:
    compile(program, "README.md", "exec")


def test_programs_use_what_is_public() -> None:
    named = {name for text in (*PROGRAMS, *SPANS) for name in re.findall(r"\bsymbiosis\.([A-Za-z_]+)\b", text)}
    assert len(named) > 5 and named <= set(symbiosis.__all__)


def test_every_public_function_has_its_row() -> None:
    assert {call.partition("(")[0] for call in API} == set(symbiosis.__all__) - {"SymbiosisError"}


@pytest.mark.parametrize("call", [call for call in API if "[" not in call])
def test_signatures_are_those_of_the_code(call: str) -> None:
    """With `...` at the end, more follow."""
    shown = call.replace(", ...)", ")")
    scope: dict[str, Any] = {}
    exec(f"def {shown}: ...", scope)
    real = inspect.signature(getattr(symbiosis, call.partition("(")[0])).parameters
    given = inspect.signature(scope[call.partition("(")[0]]).parameters
    assert {n: (p.kind, p.default) for n, p in given.items()} == {
        n: (p.kind, p.default) for n, p in real.items() if n in given or shown == call
    }


def test_calls_of_examples_fit_the_signatures() -> None:
    calls = [node for text in PROGRAMS for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    ours = [call for call in calls if ast.unparse(call.func).startswith("symbiosis.")]
    assert len(ours) > 5
    for call in ours:
        function = getattr(symbiosis, ast.unparse(call.func).partition(".")[2])
        inspect.signature(function).bind(*call.args, **{str(word.arg): word.value for word in call.keywords})


def test_options_exist() -> None:
    """Of the command before them, else of symbiosis-executor."""
    count = 0
    for text in (shown.partition(" -- ")[0] for shown in SHOWN):  # what follows is another program's
        command, script = re.search(r"\bsymbiosis (\w+)", text), re.search(r"\bpython (scripts/\w+\.py)", text)
        if script:
            known = set(re.findall(r'"(--[a-z-]+)"', (ROOT / script[1]).read_text()))
        else:
            known = options(COMMANDS[command[1]] if command else get_command(executor_app))
        named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)
        assert set(named) <= known, text
        count += len(named)
    assert count > 8


def test_commands_exist() -> None:
    named = {name for text in SHOWN for name in re.findall(r"(?:^|python -m )symbiosis (\w+)", text)}
    assert named >= {"top", "doctor", "audit", "bench"} and named <= COMMANDS.keys()


def test_every_benchmark_has_its_command() -> None:
    assert BENCHMARKS.keys() == {path.stem.removeprefix("bench_") for path in (ROOT / "scripts").glob("bench_*.py")}


def test_paths_exist() -> None:
    links = [
        link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PROSE) if "://" not in link
    ]  # sections: test_docs.py
    paths = [path for text in SHOWN for path in re.findall(r"(?<![\w/:.-])\w[\w./-]*(?:\.py|\.md|/)(?![\w/:])", text)]
    assert len(links) > 5 and len(paths) > 20
    for path in (*links, *paths):
        if "NAME" not in path and path != "train.py":  # a user's own
            assert any((ROOT / folder / path).exists() for folder in ("", "symbiosis", "docs")), path


def test_make_targets_exist() -> None:
    named = {
        target for text in SHOWN for found in re.findall(r"\bmake ([a-z, -]+)", text) for target in found.split(",")
    }
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named and {target.split()[0] for target in named} <= targets


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_commands_say_what_they_take(name: str | None) -> None:
    result = CliRunner().invoke(executor_app if name is None else app, ["--help"] if name is None else [name, "--help"])
    assert result.exit_code == 0 and "--help" in result.output


@pytest.mark.parametrize("name", ["version", "doctor"])
def test_quick_commands_run(name: str) -> None:
    done = run(name)
    assert done.returncode in ((0, 1) if name == "doctor" else (0,)), done.stderr
    assert symbiosis.__version__ in done.stdout and "Traceback" not in done.stderr
