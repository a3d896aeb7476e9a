"""`/v1/responses` at a cluster's address. A response is kept by the server that made it, which its id tells; those after it go there, too."""

import msgspec

from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router.completion_fields import BYTES_PER_TOKEN, LONG_ANSWER
from symbiosis.server.openai_protocol import Tokens


class ResponseFields(msgspec.Struct):
    """Of a body, what is read here. All else is skipped."""

    model: str | None = None
    max_output_tokens: Tokens | None = None
    previous_response_id: str | None = None


def wish_of_text(
    model: str, adapter: str | None, tenant: str, size: int, most: int | None, longest: float
) -> RoutingRequest:
    """Return what one text of `most` tokens needs of a server, by the size of the body and the longest sequence that one of them takes."""
    wanted = most or LONG_ANSWER
    pages, is_vain = size // BYTES_PER_TOKEN + wanted, wanted > longest
    return RoutingRequest(model=model, adapter=adapter, pages=0 if is_vain else pages, tenant=tenant, is_vain=is_vain)
