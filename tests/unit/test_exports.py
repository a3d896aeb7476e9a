"""The public surface: what `symbiosis` says it has, it has, and nothing else."""

import inspect
from types import ModuleType

import pytest

import symbiosis
from symbiosis import errors
from symbiosis.errors import CallError, Code, SymbiosisError


def test_all_names_can_be_imported() -> None:
    for name in symbiosis.__all__:
        assert getattr(symbiosis, name) is not None
    assert sorted(symbiosis.__all__, key=str.casefold) == sorted(set(symbiosis.__all__), key=str.casefold)


@pytest.mark.parametrize("part", [symbiosis.serving, symbiosis.training])
def test_all_names_of_parts_can_be_imported(part: ModuleType) -> None:
    for name in part.__all__:
        assert getattr(part, name) is not None, name


def test_other_names_are_refused_as_python_refuses_them() -> None:
    with pytest.raises(AttributeError, match="module 'symbiosis' has no attribute 'warp'"):
        _ = symbiosis.warp  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", symbiosis.__all__)
def test_public_names_say_what_they_are_for_and_are_annotated(name: str) -> None:
    value = getattr(symbiosis, name)
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        assert signature.return_annotation is not signature.empty
        assert all(p.annotation is not p.empty for p in signature.parameters.values())


def test_the_tree_of_errors_is_the_one_in_the_docstring() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SymbiosisError)]
    assert len(kinds) > 5
    for kind in kinds:
        assert kind.__name__ in str(errors.__doc__)


def test_errors_survive_the_way_between_processes() -> None:
    """Data loaders and launchers copy exceptions by reduction."""
    error = CallError(Code.TOO_LARGE, "too large")
    kind, arguments = error.__reduce__()
    again = kind(*arguments)
    assert (type(again), again.code, str(again)) == (CallError, Code.TOO_LARGE, "too large [TOO_LARGE]")
