"""Where the executors are that a user has named: by their URLs, or by a model's name in a cluster, which tells where they are now."""

import time
from collections.abc import Sequence

from symbiosis.errors import ExecutorUnavailable, SymbiosisError
from symbiosis.protocol.cluster_state import SCHEME, executors_at
from symbiosis.transport.patience import Patience

LOOK_EVERY_S = 0.1


def is_by_name(urls: Sequence[str]) -> bool:
    return any(url.startswith(SCHEME) for url in urls)


def located(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the endpoints of those that have one now, each once. Raises `ExecutorUnavailable` if a cluster is still starting all of them."""
    found: list[str] = []
    starting = None
    for url in urls:
        try:
            found += executors_at(url) if url.startswith(SCHEME) else (url,)
        except ExecutorUnavailable as error:
            starting = error
    if starting is not None and not found:
        raise starting
    return tuple(dict.fromkeys(found))


def located_within(urls: Sequence[str], starts_s: float, comes_s: float) -> tuple[str, ...]:
    """Return the endpoints as `located` does, as soon as there is one.

    Args:
        starts_s: How long a cluster may take to start them.
        comes_s: How long the cluster itself, or the model in it, may take to come.
    """
    if not is_by_name(urls):
        return located(urls)
    waiting = Patience(urls, max(starts_s, comes_s), "patience=, $SYMBIOSIS_PATIENCE_S")
    found: tuple[str, ...] = ()
    try:
        while not found:
            try:
                found = located(urls)
            except SymbiosisError as error:
                most = starts_s if isinstance(error, ExecutorUnavailable) else comes_s
                if time.monotonic() > waiting.begun + most:
                    raise
                time.sleep(LOOK_EVERY_S)
        return found
    finally:
        waiting.end(found[0] if found else None)


def brought_up_to_date(endpoints: tuple[str, ...], urls: Sequence[str]) -> tuple[str, ...]:
    """Return the endpoints that are still named, in their order, and then those that have come: a cluster may have moved executors, or have
    more by now. All stay if nobody can tell."""
    if not is_by_name(urls):
        return endpoints
    try:
        now = located(urls)
    except SymbiosisError:
        return endpoints
    return (*(each for each in endpoints if each in now), *(each for each in now if each not in endpoints))


def after(endpoint: str, endpoints: Sequence[str]) -> str:
    """Return the endpoint after this one: the first, if this is the last or is not among them any more.

    >>> after("b", "ab"), after("a", "ab"), after("c", "ab")
    ('a', 'b', 'a')
    """
    at = endpoints.index(endpoint) if endpoint in endpoints else -1
    return endpoints[(at + 1) % len(endpoints)]
