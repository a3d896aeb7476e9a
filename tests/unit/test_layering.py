"""Who may import whom, read from the sources; and what is loaded when a command is only asked for help."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import symbiosis

PACKAGE = Path(symbiosis.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    """`symbiosis.client.wrap` is of `client`, `symbiosis.errors` of `errors`; what is not ours goes by its top name."""
    names = module.split(".")
    return (names[1] if len(names) > 1 else "symbiosis") if names[0] == "symbiosis" else names[0]


def name_of(file: Path) -> str:
    return ".".join(("symbiosis", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(file): file for file in SOURCES}


@cache
def imports(file: Path) -> tuple[str, ...]:
    """Every module that `file` imports: also inside functions, and for type checkers only."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative imports hide who is imported"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES or node.module == "symbiosis" else str(node.module)


def of(part: str) -> list[Path]:
    files = [
        f for f in SOURCES if part_of(".".join(("symbiosis", *f.relative_to(PACKAGE).with_suffix("").parts))) == part
    ]
    assert files, f"the package has no {part}"
    return files


def ours(file: Path) -> set[str]:
    return {part_of(name) for name in imports(file) if name.startswith("symbiosis")}


ROOT = {"base", "build", "errors", "protocol", "text"}
ALLOWED = {
    "text": set[str](),
    "build": {"__version__", "symbiosis"},
    "errors": {"text"},
    "base": {"base", "build", "errors", "text"},
    "protocol": {"base", "build", "errors", "protocol", "text"},
    "kernels": {"base", "errors", "kernels"},
    "transport": {*ROOT, "kernels", "transport"},
    "offload": {"base", "errors", "kernels", "offload"},
    "client": {*ROOT, "client", "kernels", "transport"},
    "executor": {*ROOT, "executor", "kernels", "transport"},
    "run": {*ROOT, "client", "kernels", "run", "transport"},
    "training": {*ROOT, "client", "kernels", "offload", "serving", "symbiosis", "training"},
    "serving": {*ROOT, "client", "kernels", "offload", "serving", "symbiosis", "transport"},
    "server": {*ROOT, "__version__", "executor", "server", "serving", "symbiosis", "training"},
    "cluster": {*ROOT, "__version__", "cluster", "executor", "server", "serving"},
}
TOP = {"audit", "cli", "demo"}  # may import whatever they need


def test_every_part_is_held_to_something() -> None:
    parts = {part_of(".".join(("symbiosis", *f.relative_to(PACKAGE).with_suffix("").parts))) for f in SOURCES}
    assert parts - {"__init__", "__main__"} == set(ALLOWED) | TOP


@pytest.mark.parametrize("part", ALLOWED)
def test_each_part_imports_only_what_it_may(part: str) -> None:
    for file in of(part):
        assert ours(file) <= ALLOWED[part], file


@pytest.mark.parametrize(
    ("part", "packages"),
    [("kernels", {"torch", "triton"}), ("errors", set()), ("protocol", {"msgspec"})],
)
def test_what_others_wrote_is_imported_where_it_belongs(part: str, packages: set[str]) -> None:
    for file in of(part):
        foreign = {part_of(name) for name in imports(file) if not name.startswith("symbiosis")}
        assert foreign - set(sys.stdlib_module_names) <= packages, file


def test_batching_is_plain_python() -> None:
    """All that decides which calls run."""
    for file in (PACKAGE / "executor" / "scheduling").glob("*.py"):
        assert not {part_of(name) for name in imports(file)} & {"torch", "numpy", "zmq"}, file
    for file in of("cluster"):
        assert not {part_of(name) for name in imports(file)} & {"torch", "numpy", "zmq"}, file


def test_nobody_imports_through_the_links_at_the_root() -> None:
    for file in SOURCES:
        assert not {name.split(".")[0] for name in imports(file)} & {"client", "executor", "kernels"}, file


def test_modules_do_not_import_in_circles() -> None:
    """Whenever they are imported, and be it for type checkers only."""
    graph = {name: {m for m in imports(file) if m in MODULES and m != name} for name, file in MODULES.items()}
    while leaves := {name for name, needed in graph.items() if not needed}:
        graph = {name: needed - leaves for name, needed in graph.items() if name not in leaves}
    assert not graph, f"a circle among {sorted(graph)}"


def test_python_is_started_by_one_function() -> None:
    """By `procs.python`, so that nothing is imported from the working directory. A script may be named by its path: its own folder takes
    that place. What multiprocessing starts is told by the environment."""
    for file in (*SOURCES, *(PACKAGE.parent / "scripts").glob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        lists = [list(map(ast.unparse, node.elts[:2])) for node in nodes if isinstance(node, ast.List)]
        allowed = sum(["sys.executable", second] in lists for second in ("'-P'", "str(script)", "*sys.argv"))
        shown = sum(isinstance(n, ast.FormattedValue) and "sys.executable" in ast.unparse(n) for n in nodes)
        uses = sum(isinstance(node, ast.Attribute) and node.attr == "executable" for node in nodes)
        assert uses == allowed + shown, f"{file}: use symbiosis.base.procs.python"
        if any(name.startswith("multiprocessing") or name.endswith("ProcessPoolExecutor") for name in imports(file)):
            assert "PYTHONSAFEPATH" in file.read_text() or " prepare(" in file.read_text(), file
