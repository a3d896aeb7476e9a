"""The files, modules and names that the documents and docstrings speak of exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "symbiosis"
FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
SPANS = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:[\w*-]+/)*[\w*-]+\.(?:py|c|md|sh|toml|yml|yaml|ipynb)(?!\w)")
FOLDER = re.compile(r"(?:[\w-]+/)+")
NAMED_FILE = re.compile(r"`((?:symbiosis|scripts|tests)/[\w/]+\.py)`")
PRIVATE = re.compile(r"`(_\w+)`")
DOTTED = re.compile(r"[a-z_]+(?:\.\w+)+")
MADE_BY_USERS = {"FILE.yaml", "executor.yaml", "train.py"}
FOLDERS = ("symbiosis", "tests", "scripts", "docs", "deploy", "examples")
FILES = [f"/{path.name}" for path in ROOT.iterdir()] + [
    f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()
]
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def docstrings(path: Path) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text())
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in found if text]


@cache
def file_exists(name: str) -> bool:
    pattern = re.compile("/" + re.escape(name).replace(r"\*", "[^/]*").replace("NAME", "[^/]*") + "$")
    return name in MADE_BY_USERS or any(pattern.search(file) for file in FILES)


@cache
def module_name_exists(name: str) -> bool:
    """`name` is a dotted one: of modules of this package, and at its end perhaps of something in a module."""
    place, rest = PACKAGE, name.removeprefix("symbiosis.").split(".")
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if rest and (place / f"{rest[0]}.py").is_file():
        place /= f"{rest.pop(0)}.py"
    source = place if place.is_file() else place / "__init__.py"
    return not rest or (source.is_file() and re.search(rf"\b{rest[0]}\b", source.read_text()) is not None)


def dead(text: str) -> list[str]:
    """Files and modules in code spans of `text` that do not exist."""
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {"symbiosis"}
    found = []
    for span in SPANS.findall(FENCES.sub("", text)):
        found += [name for name in FILE.findall(span) if not span.startswith("http") and not file_exists(name)]
        found += [span] if FOLDER.fullmatch(span) and not any(f"/{span}" in file for file in FILES) else []
        if DOTTED.fullmatch(span) and not FILE.fullmatch(span) and span.partition(".")[0] in rooms:
            found += [] if module_name_exists(span) else [span]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert not dead(page.read_text())


def test_what_docstrings_name_exists() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in MODULES
        if (names := [name for text in docstrings(path) for name in dead(text)])
    }
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_private_names_are_in_the_files_beside_them(page: Path) -> None:
    """A paragraph that names files speaks of what is in these: a name may be gone there, and live on elsewhere."""
    found = [(paragraph, NAMED_FILE.findall(paragraph)) for paragraph in FENCES.sub("", page.read_text()).split("\n\n")]
    for paragraph, files in found:
        code = "\n".join((ROOT / file).read_text() for file in files if (ROOT / file).is_file())
        gone = [name for name in PRIVATE.findall(paragraph) if files and not re.search(rf"\b{name}\b", code)]
        assert not gone, f"none of {files} has {gone}"


def test_dead_names_are_found() -> None:
    text = "`protocol.USES`, `tests/test_soak.py`, `nccl_client.py`, `transport.cuda_step.Step`; `transport/base.py`, `protocol.Op`"
    assert dead(text) == ["protocol.USES", "tests/test_soak.py", "nccl_client.py", "transport.cuda_step.Step"]


def test_every_file_is_on_the_map() -> None:
    """That of docs/architecture.md. The audit and the demo have one word for a whole folder."""
    text = (ROOT / "docs/architecture.md").read_text().partition("## Which part may import which")[2]
    words = set(re.findall(r"\w+", text.partition("```\n")[2].partition("```")[0]))
    paths = [file.relative_to(PACKAGE).with_suffix("").parts for file in MODULES if not file.stem.startswith("__")]
    assert not {path for path in paths if (path[0] if path[0] in ("audit", "demo") else path[-1]) not in words}


def test_docstrings_are_whole_sentences() -> None:
    """One that goes on where another one ended says nothing in `help()`."""
    assert not [
        (path.name, text) for path in MODULES for text in docstrings(path) if text.startswith(("...", "The same"))
    ]
