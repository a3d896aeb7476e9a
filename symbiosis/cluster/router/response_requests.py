"""`/v1/responses` at a cluster's address. A response is kept by the server that made it, which its id tells; those after it go there, too."""

import re

import msgspec

from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router.completion_fields import BYTES_PER_TOKEN, LONG_ANSWER
from symbiosis.server.openai_protocol import Tokens

TOTAL = re.compile(
    rb'"total_tokens":(\d+)'
)  # a text of a client cannot have it: there quotation marks have backslashes


class ResponseFields(msgspec.Struct):
    """Of a body, what is read here. All else is skipped."""

    model: str = ""
    max_output_tokens: Tokens | None = None
    previous_response_id: str | None = None

    def wish(self, model: str, adapter: str | None, tenant: str, size: int, longest: float) -> RoutingRequest:
        """Return what it needs of a server, by the size of the body and the longest sequence that one of them takes."""
        wanted = self.max_output_tokens or LONG_ANSWER
        pages, is_vain = size // BYTES_PER_TOKEN + wanted, wanted > longest
        return RoutingRequest(
            model=model, adapter=adapter, pages=0 if is_vain else pages, tenant=tenant, is_vain=is_vain
        )


def tokens_told(tail: bytes) -> int:
    """Return how many tokens a response says at its end that it took.

    >>> tokens_told(b'..."usage":{"total_tokens":12},"user":null}'), tokens_told(b"")
    (12, 0)
    """
    found = TOTAL.findall(tail)
    return int(found[-1]) if found else 0
