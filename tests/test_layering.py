"""Who may import whom, read from the sources; and what is loaded when a command is only asked for help."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import symbiosis

PACKAGE = Path(symbiosis.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    """`symbiosis.client.wrap` is of `client`, `symbiosis.errors` of `errors`; what is not ours goes by its top name."""
    names = module.split(".")
    return (names[1] if len(names) > 1 else "symbiosis") if names[0] == "symbiosis" else names[0]


def imports(file: Path, *, late: bool = True) -> Iterator[str]:
    """Every module that `file` imports (`late`: also inside functions), except for type checkers only."""
    tree = ast.parse(file.read_text())
    skipped = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    if not late:
        skipped += [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    hidden = {id(inner) for outer in skipped for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative imports hide who is imported"
            if node.module == "symbiosis":
                yield from (f"symbiosis.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)


def of(part: str) -> list[Path]:
    files = [
        f for f in SOURCES if part_of(".".join(("symbiosis", *f.relative_to(PACKAGE).with_suffix("").parts))) == part
    ]
    assert files, f"the package has no {part}"
    return files


def ours(file: Path) -> set[str]:
    return {part_of(name) for name in imports(file) if name.startswith("symbiosis")}


ALLOWED = {
    "kernels": {"kernels"},
    "text": set[str](),
    "errors": {"text"},
    "endpoints": {"errors"},
    "choice": set[str](),
    "names": set[str](),
    "protocol": {"errors"},
    "config": {"errors", "ownership", "protocol"},
    "fingerprint": {"protocol"},
    "mps": {"config", "errors", "ownership"},
    "ownership": {"errors"},
    "keys": {"errors", "ownership"},
    "keystream": set[str](),
    "transport": {"endpoints", "errors", "fingerprint", "keys", "ownership", "protocol", "text", "transport"},
    "client": {
        "choice",
        "client",
        "config",
        "errors",
        "fingerprint",
        "kernels",
        "keystream",
        "mps",
        "names",
        "protocol",
        "text",
        "transport",
    },
    "executor": {
        "choice",
        "config",
        "endpoints",
        "errors",
        "executor",
        "fingerprint",
        "kernels",
        "keys",
        "keystream",
        "mps",
        "ownership",
        "names",
        "protocol",
        "text",
        "transport",
    },
}


@pytest.mark.parametrize("part", ALLOWED)
def test_each_part_imports_only_what_it_may(part: str) -> None:
    for file in of(part):
        assert ours(file) <= ALLOWED[part], file


@pytest.mark.parametrize(
    ("part", "packages"),
    [("kernels", {"torch", "triton"}), ("errors", set()), ("mps", set()), ("protocol", {"msgspec"})],
)
def test_what_others_wrote_is_imported_where_it_belongs(part: str, packages: set[str]) -> None:
    for file in of(part):
        foreign = {part_of(name) for name in imports(file) if not name.startswith("symbiosis")}
        assert foreign - set(sys.stdlib_module_names) <= packages, file


def test_batching_is_plain_python() -> None:
    assert not {part_of(name) for name in imports(PACKAGE / "executor" / "batcher.py")} & {"torch", "numpy", "zmq"}


def test_nobody_imports_through_the_links_at_the_root() -> None:
    for file in SOURCES:
        assert not {name.split(".")[0] for name in imports(file)} & {"client", "executor", "kernels"}, file


def test_modules_do_not_import_in_circles() -> None:
    """By what is imported when a module is loaded."""
    names = {
        ".".join(("symbiosis", *f.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): f
        for f in SOURCES
    }
    graph = {name: {m for m in imports(file, late=False) if m in names and m != name} for name, file in names.items()}
    while leaves := {name for name, needed in graph.items() if not needed}:
        graph = {name: needed - leaves for name, needed in graph.items() if name not in leaves}
    assert not graph, f"a circle among {sorted(graph)}"


HEAVY = ("torch", "transformers", "peft", "numpy", "zmq", "accelerate")


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
        "import symbiosis.protocol, symbiosis.config, symbiosis.errors, symbiosis.mps, symbiosis.doctor, symbiosis.executor.preflight",
        "import sys; sys.argv = ['symbiosis-executor', '--help']; from symbiosis.cli import executor_main; executor_main()",
        "import sys; sys.argv = ['symbiosis', '--help']; from symbiosis.cli import main; main()",
        "import sys; sys.argv = ['symbiosis', 'version']; from symbiosis.cli import main; main()",
    ],
)
def test_help_and_import_load_nothing_heavy(code: str) -> None:
    assert loaded_by(code) == set()


def test_the_check_for_heavy_packages_would_notice_one() -> None:
    assert "numpy" in loaded_by("import numpy")
