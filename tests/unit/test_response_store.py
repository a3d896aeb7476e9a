"""Responses that later ones go on from: who fills the room makes it."""

from typing import Any

import pytest

from symbiosis.server.api_errors import ApiError
from symbiosis.server.response_store import OVERHEAD, ResponseStore


def put(store: ResponseStore, tenant: str, id: str, size: int = 1000) -> None:
    messages: list[dict[str, Any]] = [{"content": "x" * size}]
    store.put(tenant, id, {"id": id}, messages)


def has(store: ResponseStore, tenant: str, id: str) -> bool:
    try:
        return store.messages(tenant, id) != []
    except ApiError:
        return False


def test_whoever_has_most_makes_room() -> None:
    store = ResponseStore(10 * (1000 + OVERHEAD + 100))
    put(store, "bob", "b")
    for number in range(50):
        put(store, "anna", str(number))
    assert has(store, "bob", "b") and has(store, "anna", "49") and not has(store, "anna", "0")
    assert sum(has(store, "anna", str(number)) for number in range(50)) == 9


def test_nobody_sees_anothers_and_none_is_larger_than_half() -> None:
    store = ResponseStore(10_000)
    put(store, "anna", "a")
    assert not has(store, "bob", "a")
    put(store, "anna", "large", 6000)
    assert has(store, "anna", "a") and not has(store, "anna", "large")


def test_one_that_comes_again_replaces_itself() -> None:
    store = ResponseStore(4000)
    for _ in range(10):
        put(store, "anna", "a")
        put(store, "anna", "b")
    assert has(store, "anna", "a") and has(store, "anna", "b")
    store.remove("anna", "a")
    with pytest.raises(ApiError, match="there is no response 'a'"):
        store.remove("anna", "a")
