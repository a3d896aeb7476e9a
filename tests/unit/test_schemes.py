"""Every scheme of URLs has a transport and a check before start; none is taken for another."""

import typing

import pytest

from symbiosis import endpoints, transport
from symbiosis.executor import preflight


def test_every_scheme_is_checked_before_start() -> None:
    assert set(preflight.SCHEMES) == set(endpoints.SCHEMES)


@pytest.mark.parametrize("end", ["connect", "listen"])
def test_a_scheme_without_a_transport_is_not_taken_for_tcp(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "SCHEMES", (*endpoints.SCHEMES, "rdma"))
    opened: typing.Callable[..., object] = getattr(transport, end)
    with pytest.raises(NotImplementedError, match="no transport is written for rdma://"):
        opened("rdma://127.0.0.1:1", None, 0.1)
