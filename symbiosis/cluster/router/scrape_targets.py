"""What Prometheus needs of a cluster: where each process has its figures now, and those figures by way of a front end."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

from symbiosis.cluster.router.server_registry import ANSWER_S
from symbiosis.cluster.router.upstream import Lost, Upstream
from symbiosis.protocol.cluster_state import Member, Told
from symbiosis.server.api_errors import ApiError

METRICS = "/cluster/metrics"


def targets(told: Told, here: str | None) -> list[dict[str, Any]]:
    """Return the address of each process, in the form of Prometheus's `http_sd_configs`. A process's name is its instance, since its address
    may change. `here`: the address of the front end, if it is asked for the figures of all.

    >>> told = Told(name="lab", url="", members=(Member(name="front-1", kind="front", pages="http://127.0.0.1:9400"),))
    >>> [each["targets"] for each in (*targets(told, None), *targets(told, "lab.example:8000"))]
    [['127.0.0.1:9400'], ['lab.example:8000']]
    """
    return [_target(told.name, member, here) for member in told.members if member.pages]


def _target(cluster: str, member: Member, here: str | None) -> dict[str, Any]:
    labels = {"instance": member.name, "member": member.name, "kind": member.kind, "model": member.model, "cluster": cluster}  # fmt: skip
    if here is None:
        return {"targets": [urlsplit(member.pages).netloc], "labels": labels}
    return {"targets": [here], "labels": {**labels, "__metrics_path__": f"{METRICS}/{member.name}"}}


async def metrics_of(told: Told, name: str) -> tuple[int, bytes]:
    """Return status and body of a process's figures, for a Prometheus that reaches the front end only."""
    pages = next((each.pages for each in told.members if each.name == name), "")
    if not pages:
        raise ApiError(404, f"there is no process {name!r:.80} that has figures")
    try:
        async with asyncio.timeout(ANSWER_S):
            return await Upstream.fetch(pages, "/metrics")
    except (Lost, TimeoutError):
        raise ApiError(503, f"{name} does not answer") from None
