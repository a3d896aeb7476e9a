"""The examples in docstrings run and print what they say; every public function has one."""

import doctest
import importlib
import pkgutil
from contextvars import copy_context

import pytest

import symbiosis

MODULES = [
    name
    for _, name, is_package in pkgutil.walk_packages(symbiosis.__path__, "symbiosis.")
    if not is_package and not name.startswith("symbiosis.demo.")
]


@pytest.mark.timeout(600)  # on a busy machine
def test_docstring_examples() -> None:
    failed = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name not in ("ray", "triton"):  # an extra; what comes with torch for a GPU only
                raise
            continue
        # an example may begin a request, and the tests that follow in this process are not about it
        failed[name] = copy_context().run(doctest.testmod, module, optionflags=doctest.ELLIPSIS).failed
    assert len(failed) > 200 and not [name for name, count in failed.items() if count]


def test_public_names_have_examples() -> None:
    for name in symbiosis.__all__:
        value = getattr(symbiosis, name)
        if not (isinstance(value, type) and issubclass(value, Exception)):
            assert ">>>" in (value.__doc__ or ""), name
