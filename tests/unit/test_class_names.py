"""Every file says first what it is for, and classes have names of their own."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import symbiosis

PACKAGE = Path(symbiosis.__file__).parent


@cache
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def test_every_file_says_first_what_it_is_for() -> None:
    for file, tree in trees().items():
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        assert len(first.split()) > 3, f"{file.relative_to(PACKAGE)} must begin with a line that says what it is for"
        assert len(first) <= 160, f"the first line of {file.relative_to(PACKAGE)} is too long: say it in a sentence"


def test_no_two_classes_have_one_name() -> None:
    names = Counter(node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]
