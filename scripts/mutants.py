"""Counts how many small mistakes the fast tests notice: one comparison, operator, constant or boolean changed at a time, at random.

First it records which fast tests execute which lines, and how long each takes; files of tests that have not changed since are not run
again. Then each mutant runs against the tests that execute its line, the quickest first, those of tests/unit before those of
tests/inproc, until one fails. It runs in a fork of this process, which has imported what the tests import from outside. A mutant that
passes them all survives: it is equivalent, or a test is missing.

    python scripts/mutants.py                       # 200 mutants of eight modules that need no process
    python scripts/mutants.py --count 40 --seed 1   # others
    python scripts/mutants.py --modules symbiosis/executor/calls/price.py --count 1000   # all of one
"""

import argparse
import ast
import copy
import gc
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import random
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import coverage
import pytest

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
RECORDED = (  # folders of which executed lines are noted
    "symbiosis/base", "symbiosis/cluster", "symbiosis/executor/calls", "symbiosis/executor/scheduling", "symbiosis/protocol",
    "symbiosis/serving/engine", "symbiosis/serving/kv_cache", "symbiosis/serving/scheduler",
)  # fmt: skip
CACHE = ROOT / ".pytest_cache/mutants"
MARKED = "not gpu and not multi_gpu and not ray and not soak and not full and not alone and not long"
AT_ONCE = 2
MOST_S = 20  # of tests that one mutant runs
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

    file: str
    line: int
    before: str
    after: str
    lines: frozenset[int]  # a test that executes none of these cannot notice; empty: unknown
    names: frozenset[str]  # of a constant: tests that name it notice, too
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: `{self.before}` as `{self.after}`"


# ---------------------------------------------------------------- mutants


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


class Place(NamedTuple):
    """Where a node that can be changed hangs: below whom, in which field, at which place of a list, and in which statements."""

    parent: ast.AST
    field: str
    at: int | None
    statements: tuple[ast.stmt, ...]

    @property
    def node(self) -> Any:
        held = getattr(self.parent, self.field)
        return held if self.at is None else held[self.at]

    def replace(self, new: ast.AST) -> None:
        if self.at is None:
            setattr(self.parent, self.field, new)
        else:
            getattr(self.parent, self.field)[self.at] = new


def places(tree: ast.Module) -> Iterator[Place]:
    """Yield the places of nodes that can be changed. Types and decorators are left out."""

    def walk(parent: ast.AST, statements: tuple[ast.stmt, ...]) -> Iterator[Place]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "keywords") and not isinstance(parent, ast.Call):
                continue
            for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    inside = (*statements, child) if isinstance(child, ast.stmt) else statements
                    if changed(child) is not None:
                        yield Place(parent, field, at, inside)
                    yield from walk(child, inside)

    yield from walk(tree, ())


def module_of(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts)


def count_of(file: str) -> int:
    """Return how many mutants a file has."""
    return sum(1 for _ in places(ast.parse((ROOT / file).read_text())))


def mutant_of(file: str, number: int) -> Mutant:
    """Return one of a file's mutants."""
    tree = ast.parse((ROOT / file).read_text())
    place = next(islice(places(tree), number, None))
    old, names = place.node, names_of(place)
    lines = lines_of(place, tree, names)
    new = changed(old)
    assert new is not None
    place.replace(new)
    source = ast.unparse(ast.fix_missing_locations(tree))
    return Mutant(file, old.lineno, ast.unparse(old), ast.unparse(new), lines, names, source)


def names_of(place: Place) -> frozenset[str]:
    """Return the constants of the module whose value the change is in."""
    statement = place.statements[0]
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return frozenset()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return frozenset(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def lines_of(place: Place, tree: ast.Module, names: frozenset[str]) -> frozenset[int]:
    """Return the lines of which a test executes one when it runs what is changed. Of a constant they are those that use it."""
    inner = place.statements[-1]
    if names:
        used = (each for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
        return frozenset(each.lineno for each in used if each.id in names)
    if not any(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in place.statements):
        return frozenset()
    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):  # a default
        return frozenset(range(inner.body[0].lineno, (inner.end_lineno or inner.lineno) + 1))
    return frozenset(range(inner.lineno, (place.node.end_lineno or inner.lineno) + 1))


# ---------------------------------------------------------------- which tests execute what


class Recorder:
    """Notes of each test how long it takes, and which lines it executes; written to the cache by files of tests."""

    def __init__(self) -> None:
        include = [f"{ROOT}/{folder}/*" for folder in RECORDED]
        self._coverage = coverage.Coverage(data_file=None, include=include, config_file=False, messages=False)
        self._seconds: dict[str, dict[str, float]] = defaultdict(dict)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        begun = time.monotonic()
        result = yield
        self._seconds[item.nodeid.partition("::")[0]][item.nodeid] = time.monotonic() - begun
        return result

    def write(self, tests: Sequence[Path]) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        executed: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for file in data.measured_files():
            for line, names in data.contexts_by_lineno(file).items():
                for name in filter(None, names):
                    executed[name.partition("::")[0]][str(Path(file).relative_to(ROOT))][line].append(name)
        for test in tests:
            name = str(test.relative_to(ROOT))
            recorded_at(test).write_text(json.dumps({"seconds": self._seconds[name], "lines": executed[name]}))
        outside = [
            n for n, module in sys.modules.items() if "site-packages" in (getattr(module, "__file__", None) or "")
        ]
        (CACHE / f"{os.getpid()}.imports").write_text("\n".join(outside))


def fast_tests() -> list[Path]:
    """Return the files of tests/unit, and those of tests/inproc that name a part of which executed lines are noted."""
    named = re.compile("|".join(re.escape(folder.replace("/", ".")) for folder in RECORDED))
    inproc = (path for path in sorted((ROOT / "tests/inproc").glob("test_*.py")) if named.search(path.read_text()))
    return [*sorted((ROOT / "tests/unit").glob("test_*.py")), *inproc]


def recorded_at(test: Path) -> Path:
    """Return the file of the cache for a file of tests as it is now."""
    return (
        CACHE / f"{test.parent.name}.{test.stem}.{hashlib.blake2b(test.read_bytes(), digest_size=8).hexdigest()}.json"
    )


def record(modules: Sequence[str]) -> tuple[dict[str, float], dict[str, dict[int, set[str]]]]:
    """Return how long each fast test takes, and which of them execute a line, by module."""
    every = fast_tests()
    CACHE.mkdir(parents=True, exist_ok=True)
    recorded = [path.read_bytes() for folder in RECORDED for path in sorted((ROOT / folder).glob("*.py"))]
    fresh = CACHE / hashlib.blake2b(b"".join(recorded), digest_size=8).hexdigest()
    if not fresh.exists():  # lines have other numbers now
        for path in CACHE.iterdir():
            path.unlink()
        fresh.touch()
    stale = sorted((path for path in every if not recorded_at(path).exists()), key=lambda each: each.stat().st_size)
    parts = [part for n in range(AT_ONCE) if (part := stale[n::AT_ONCE])]
    for pid in [forked(lambda part=part: _record(part)) for part in parts]:
        os.waitpid(pid, 0)
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in every:
        found = json.loads(recorded_at(path).read_text())
        seconds |= found["seconds"]
        for name in modules:
            for line, names in found["lines"].get(name, {}).items():
                lines[name][int(line)].update(names)
    return seconds, lines


def import_from_outside() -> None:
    """Import what the fast tests import that is not of this repository, so that no mutant has to."""
    for name in dict.fromkeys(name for path in sorted(CACHE.glob("*.imports")) for name in path.read_text().split()):
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _record(tests: Sequence[Path]) -> int:
    recorder = Recorder()
    status = _pytest(tests, recorder)
    recorder.write(tests)
    return status


def _pytest(tests: Sequence[Path | str], plugin: object) -> int:
    """Run tests without output. The first that fails is the last, and what hypothesis finds it does not make smaller."""
    from hypothesis import Phase, settings

    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutants", deadline=None, database=None, derandomize=True, phases=phases)
    arguments = ["-q", "--no-header", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "-m", MARKED]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return int(pytest.main([*arguments, *map(str, tests)], plugins=[plugin]))


def forked(work: Any) -> int:
    """Run work in a fork of this process, whose group is its own, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    status = 1
    try:
        status = work()
    finally:
        os._exit(status)


# ---------------------------------------------------------------- running them


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


class Chosen:
    """Leaves only some tests, in their order, and ends with the first that fails."""

    def __init__(self, names: Sequence[str]) -> None:
        self._order = {name: number for number, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (each for each in items if each.nodeid in self._order), key=lambda each: self._order[each.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(1)


def chosen_for(mutant: Mutant, seconds: dict[str, float], lines: dict[int, set[str]]) -> list[str]:
    """Return the tests that execute what is changed, the quickest first, those of tests/unit before others."""
    names = set().union(*(lines[line] for line in mutant.lines), naming(mutant.names, seconds))
    names = names or set().union(*lines.values())
    chosen, left = [], float(MOST_S)
    for name in sorted(names, key=lambda each: (not each.startswith("tests/unit/"), seconds[each], each)):
        left -= seconds[name]
        if left < 0:
            break
        chosen.append(name)
    return chosen


def naming(constants: frozenset[str], tests: Iterable[str]) -> set[str]:
    """Return the tests whose functions name one of these constants."""
    found = set()
    for file in fast_tests() if constants else ():
        for each in ast.parse(file.read_text()).body:
            if isinstance(each, ast.FunctionDef) and constants & set(re.findall(r"\w+", ast.unparse(each))):
                found.add(f"{file.relative_to(ROOT)}::{each.name}")
    return {name for name in tests if name.partition("[")[0] in found}


def run(mutant: Mutant, names: Sequence[str]) -> int:
    sys.meta_path.insert(0, Replaced(mutant))
    return _pytest(list(dict.fromkeys(name.partition("::")[0] for name in names)), Chosen(names))


def survivors_of(chosen: Sequence[Mutant], modules: Sequence[str]) -> list[Mutant]:
    """Run mutants, some at once, and return those that pass. One that takes far longer than its tests do never ends, which is noticed."""
    seconds, lines = record(modules)
    import_from_outside()
    imported = {module_of(file) for file in modules} & sys.modules.keys()
    assert not imported, f"{imported} would run as they are"
    begun, survivors, running = time.monotonic(), list[Mutant](), dict[int, tuple[Mutant, float]]()
    left = list(reversed(chosen))
    while left or running:
        while left and len(running) < AT_ONCE:
            mutant = left.pop()
            names = chosen_for(mutant, seconds, lines[mutant.file])
            until = time.monotonic() + 30 + 5 * sum(seconds[name] for name in names)
            running[forked(lambda mutant=mutant, names=names: run(mutant, names))] = mutant, until
        for pid, (mutant, until) in list(running.items()):
            ended, how = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() > until:
                os.killpg(pid, signal.SIGKILL)
                ended, how = os.waitpid(pid, 0)
            if ended:
                del running[pid]
                if how == 0:
                    survivors.append(mutant)
                    print(mutant, flush=True)
                if (done := len(chosen) - len(left) - len(running)) % 20 == 0:
                    told = f"{done} run, {len(survivors)} alive, {time.monotonic() - begun:.0f} s"
                    print(told, file=sys.stderr, flush=True)
        time.sleep(0.02)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="+", default=MODULES)
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    every = [(file, number) for file in options.modules for number in range(count_of(file))]
    drawn = random.Random(options.seed).sample(every, min(options.count, len(every)))
    chosen = [mutant_of(file, number) for file, number in sorted(drawn)]
    survivors = survivors_of(chosen, options.modules)
    from symbiosis.base.reporting import Report  # not before: a mutant may be of it

    report = Report("mutants")
    report.figure("mutants", len(chosen))
    report.figure("alive", [str(mutant) for mutant in survivors])
    report.bar("killed", 1 - len(survivors) / len(chosen), ">=", LEAST)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
