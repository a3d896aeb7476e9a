"""Functions and classes stay short enough to be read at one glance, and have names of their own. What is longer says in its source why a reader is better off."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import symbiosis

PACKAGE = Path(symbiosis.__file__).parent
LONGEST_FUNCTION, LONGEST_CLASS = 40, 300  # lines, without the docstring
LONGER = {
    "cli.py executor": "its parameters are the options that --help shows",
    "kernels/gpu/adapter_rows.py _expand": "one loop over pointers that it has just laid out",
    "kernels/gpu/paged_attention.py _decode": "one loop over pointers that it has just laid out",
    "kernels/gpu/adapter_rows.py _expand_one": "one loop over pointers that it has just laid out",
    "kernels/gpu/paged_attention.py _prefill": "one loop over pointers that it has just laid out",
    "kernels/gpu/integer_products.py _multiply": "one loop over pointers that it has just laid out",
    "transport/cuda/client.py DeviceLine": "one lock and one memory bind all that it does",
}
# Two classes have each of these names. docs/architecture.md says in its table of words what either is.
TWICE = {
    "Beat", "Connection", "Engine", "Front", "Lanes", "Link", "Reply", "Segment", "Server", "Step", "View", "Welcome",
}  # fmt: skip


@cache
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    first = node.body[0]
    is_told = ast.get_docstring(node, clean=False) is not None and first.end_lineno is not None
    return node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if is_told else 0)  # type: ignore[operator]


def too_long() -> Iterator[str]:
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                most = LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION
                if lines(node) > most:
                    yield f"{file.relative_to(PACKAGE).as_posix()} {node.name}"


def test_only_what_has_a_reason_is_longer() -> None:
    longer = set(too_long())
    assert not longer - set(LONGER), f"longer than {LONGEST_FUNCTION} (classes: {LONGEST_CLASS}) lines: split them"
    assert longer == set(LONGER), "some need no reason any more: take them out of LONGER"


def test_every_file_says_first_what_it_is_for() -> None:
    for file, tree in trees().items():
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        assert len(first.split()) > 3, f"{file.relative_to(PACKAGE)} must begin with a line that says what it is for"
        assert len(first) <= 160, f"the first line of {file.relative_to(PACKAGE)} is too long: say it in a sentence"


def test_no_two_classes_have_one_name() -> None:
    names = Counter(node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == TWICE and max(names.values()) == 2
    told = (PACKAGE.parent / "docs/architecture.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    words = set(re.findall(r"\w+", " ".join(re.findall(r"^\| (.*?) \|", told, re.MULTILINE))))
    assert {name.lower().removesuffix("s") for name in TWICE} <= words
