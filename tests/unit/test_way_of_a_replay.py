"""The way of one replay, as docs/architecture.md tells it: each step is a function that a step before it leads to."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import symbiosis

PACKAGE = Path(symbiosis.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
MOST = 14
Functions = dict[str, ast.FunctionDef]


def functions(file: str) -> Functions:
    """The functions of a file by their names, methods as `Class.name`."""
    tree = ast.parse((PACKAGE / file).read_text())
    found: Functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{kind.name}.{node.name}": node for node in kind.body if isinstance(node, ast.FunctionDef)}
    return found


def led_to(known: Functions, start: str) -> set[str]:
    """The names that a function mentions, also by way of others of its file."""
    names: set[str] = set()
    waiting, seen = [start], set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        mentioned = {node.attr for node in ast.walk(known[name]) if isinstance(node, ast.Attribute)}
        names |= mentioned
        waiting += [other for other in known if other.rpartition(".")[2] in mentioned and other not in seen]
    return names


def parties(text: str) -> Iterator[list[tuple[str, str]]]:
    """The steps of each one that acts."""
    for paragraph in re.split(r"\n\n(?!\d)", text):
        if steps := STEP.findall(paragraph):
            yield steps


def test_a_replay_goes_the_way_that_is_told() -> None:
    text = ARCHITECTURE.read_text().partition("## The way of one replay")[2].partition("\n## ")[0]
    told = list(parties(text))
    assert [len(steps) for steps in told] == [4, 5, 3, 1] and sum(map(len, told)) <= MOST
    for steps in told[:2]:  # those of a CPU: one leads to the next
        reached: set[str] = {steps[0][1].rpartition(".")[2]}
        for file, name in steps:
            assert name.rpartition(".")[2] in reached, f"no step leads to {name}"
            reached |= led_to(functions(file), name)
    for file, name in (step for steps in told for step in steps):
        assert name in functions(file), f"{file} has no {name}"
    playback = functions("executor/gpu/playback.py")
    assert {"wait", "answer"} <= led_to(playback, "Playback.begin"), "its graph waits and answers"
    assert "call" in led_to(functions("transport/cuda/captured_step.py"), "CapturedSteps.begin"), (
        "the client's graph calls"
    )
    assert "look" in led_to(functions("executor/loop.py"), "ExecutorLoop._step")
