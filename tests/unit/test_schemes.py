"""Every scheme of URLs has a transport and a check before start; none is taken for another."""

import ast
import re
import typing
from pathlib import Path

import pytest

from symbiosis import transport
from symbiosis.executor import preflight
from symbiosis.protocol import endpoints

ASKED = re.compile("scheme|url|endpoint|transport")  # what is compared, if it is a transport


def test_every_scheme_is_checked_before_start() -> None:
    assert set(preflight.SCHEMES) == set(endpoints.SCHEMES)


def test_nobody_else_asks_which_transport_it_is() -> None:
    """`symbiosis.protocol.endpoints` and `symbiosis.transport` answer what an endpoint can do."""
    root = Path(transport.__file__).parents[1]
    schemes = {scheme + end for scheme in endpoints.SCHEMES for end in ("", "://")}
    for file in root.rglob("*.py"):
        named = any(f'"{scheme}"' in file.read_text() for scheme in schemes)
        if not named or file.name == "endpoints.py" or (root / "transport") in file.parents:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            asked = node.comparators if isinstance(node, ast.Compare) and ASKED.search(ast.unparse(node.left)) else []
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "removeprefix"):
                asked = node.args
            for constant in (each for one in asked for each in ast.walk(one) if isinstance(each, ast.Constant)):
                assert constant.value not in schemes, f"{file}:{node.lineno}"


@pytest.mark.parametrize("end", ["connect", "listen"])
def test_a_scheme_without_a_transport_is_not_taken_for_tcp(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "SCHEMES", (*endpoints.SCHEMES, "rdma"))
    opened: typing.Callable[..., object] = getattr(transport, end)
    with pytest.raises(NotImplementedError, match="no transport is written for rdma://"):
        opened("rdma://127.0.0.1:1", None, 0.1)
