"""`/v1/responses` at a cluster's address. A response is kept by the server that made it, which its id tells; those after it go there, too."""

import re

import msgspec

from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router.completion_fields import BYTES_PER_TOKEN, LONG_ANSWER
from symbiosis.server.openai_protocol import Tokens

# at the very end of an answer, or of the event with it: all else that looks so may be of a client
TOTAL = re.compile(rb'"total_tokens":(\d+)(?:,"prompt_tokens_details":\{"cached_tokens":\d+\})?\}\}(?:\}\n\n)?\Z')


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


def tokens_used(tail: bytes | None, reserved: int) -> int:
    """Return how many tokens a response, or vectors, took, by the end of its answer: what was reserved, where its reader has left before that. None: no server
    took the request.

    >>> tokens_used(b'..."usage":{"total_tokens":12}}', 99), tokens_used(b"...", 99), tokens_used(None, 99)
    (12, 99, 0)
    """
    if tail is None:
        return 0
    found = TOTAL.search(tail)
    return int(found[1]) if found else reserved
