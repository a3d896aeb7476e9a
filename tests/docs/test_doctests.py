"""The examples in docstrings run and print what they say; every public function has one."""

import doctest
import importlib
import pkgutil

import pytest

import symbiosis

MODULES = [
    name
    for _, name, is_package in pkgutil.walk_packages(symbiosis.__path__, "symbiosis.")
    if not is_package and not name.startswith("symbiosis.demo.")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in ("ray", "triton"):  # an extra; what comes with torch for a GPU only
            raise
        pytest.skip(f"needs {missing.name}")
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_public_names_have_examples() -> None:
    for name in symbiosis.__all__:
        value = getattr(symbiosis, name)
        if not (isinstance(value, type) and issubclass(value, Exception)):
            assert ">>>" in (value.__doc__ or ""), name
