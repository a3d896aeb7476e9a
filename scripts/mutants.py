"""Whether tests notice: random changes of one comparison, operator, constant or boolean each, and how many of them the fast tests kill.

A mutant is run against the files of tests/unit and tests/inproc that name its module, without what is marked as long, in a process that is
forked once torch is imported. One that these tests pass survives: it is equivalent, or a test is missing.

    python scripts/mutants.py                       # 200 mutants of modules that need no process; some ten minutes
    python scripts/mutants.py --count 40 --seed 1   # others
    python scripts/mutants.py --modules symbiosis/executor/calls/price.py
"""

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import io
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from symbiosis.base.reporting import Report

ROOT = Path(__file__).parents[1]
MODULES = (
    "symbiosis/serving/scheduler/policy.py",
    "symbiosis/serving/scheduler/scheduler.py",
    "symbiosis/executor/scheduling/batcher.py",
    "symbiosis/cluster/placement.py",
    "symbiosis/executor/calls/price.py",
    "symbiosis/serving/kv_cache/block_manager.py",
    "symbiosis/serving/kv_cache/page_pool.py",
    "symbiosis/cluster/scaling.py",
)
MARKED = "not gpu and not multi_gpu and not ray and not soak and not alone and not long"
LONGEST_S = 60  # a mutant that runs longer never ends, which a test notices
LEAST = 0.85
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


class Mutant(NamedTuple):
    """A module with one change."""

    file: Path
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: `{self.before}` as `{self.after}`"


def changed(node: ast.AST) -> ast.AST | None:
    """Return the node with what it says turned round, or None if it is of no kind that is changed."""
    node = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[operator, *_]):
            node.ops[0] = COMPARISONS[type(operator)]()
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in OPERATORS:
            node.op = OPERATORS[type(operator)]()
        case ast.BoolOp(op=operator):
            node.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int() | float() as value):
            node.value = value + 1
        case _:
            return None
    return node


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yield where a node that can be changed hangs: below whom, in which field, at which place of a list. Types and decorators are left out."""

    def walk(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "keywords") and not isinstance(parent, ast.Call):
                continue
            for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    if changed(child) is not None:
                        yield parent, field, at
                    yield from walk(child)

    yield from walk(tree)


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    text = (ROOT / file).read_text()
    for number, _ in enumerate(places(ast.parse(text))):
        tree = ast.parse(text)
        parent, field, at = list(places(tree))[number]
        held: Any = getattr(parent, field)
        old = held if at is None else held[at]
        new = changed(old)
        assert new is not None
        line, before, after = old.lineno, ast.unparse(old), ast.unparse(new)
        if at is None:
            setattr(parent, field, new)
        else:
            held[at] = new
        yield Mutant(file, line, before, after, ast.unparse(ast.fix_missing_locations(tree)))


def module_of(file: Path) -> str:
    return ".".join(file.with_suffix("").parts)


def tests_of(file: Path) -> list[Path]:
    """The files of fast tests that name the module, or what a package hands on of it."""
    module = module_of(file)
    package, _, name = module.rpartition(".")
    named = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    folders = (ROOT / "tests/unit", ROOT / "tests/inproc")
    return [path for folder in folders for path in sorted(folder.glob("test_*.py")) if named.search(path.read_text())]


class Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from other text than its file's."""

    def __init__(self, mutant: Mutant) -> None:
        self._name, self._mutant = module_of(mutant.file), mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=str(ROOT / self._mutant.file))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(ROOT / self._mutant.file)
        exec(compile(self._mutant.source, module.__file__, "exec"), module.__dict__)


def survives(mutant: Mutant, tests: Sequence[Path]) -> bool:
    """Whether the tests pass. They run in a fork of this process, which must not have imported the package's modules."""
    pid = os.fork()
    if not pid:
        os.setsid()
        signal.alarm(LONGEST_S)
        status = 1
        try:
            status = _run(mutant, tests)
        finally:
            os._exit(status)
    _, how = os.waitpid(pid, 0)
    return how == 0


def _run(mutant: Mutant, tests: Sequence[Path]) -> int:
    import pytest

    sys.meta_path.insert(0, Replaced(mutant))
    arguments = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", MARKED, *map(str, tests)]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return int(pytest.main(arguments))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", type=Path, nargs="+", default=[Path(name) for name in MODULES])
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import pytest  # noqa: F401  # imported once, for all forks
    import transformers  # noqa: F401

    every = [mutant for file in options.modules for mutant in mutants(file)]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    survivors, begun = [], time.monotonic()
    for number, mutant in enumerate(sorted(chosen), 1):
        if survives(mutant, tests_of(mutant.file)):
            survivors.append(mutant)
            print(mutant, flush=True)
        if number % 20 == 0:
            print(
                f"{number} run, {len(survivors)} alive, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True
            )
    report = Report("mutants")
    report.figure("mutants", len(chosen))
    report.figure("alive", [str(mutant) for mutant in survivors])
    report.bar("killed", 1 - len(survivors) / len(chosen), ">=", LEAST)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
