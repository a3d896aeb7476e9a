"""`/v1/responses` at a cluster's address. A response is kept by the server that made it, which its id tells; those after it go there, too."""

import re

import msgspec

from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router.completion_fields import BYTES_PER_TOKEN, LONG_ANSWER
from symbiosis.cluster.router.forward import AnswerEnd
from symbiosis.server.openai_protocol import Tokens

# at the very end of an answer, or of the event with it: all else that looks so may be of a client
TOTAL = re.compile(rb'"total_tokens":(\d+)(?:,"prompt_tokens_details":\{"cached_tokens":\d+\})?\}\}(?:\}\n\n)?\Z')
# of streams of completions
OF_COMPLETION = re.compile(rb": total_tokens (\d+)\ndata: \[DONE\]\n\n\Z")
# of streams of /generate
OF_GENERATE = re.compile(rb'"prompt_tokens":(\d+),"generated_tokens":(\d+),"seed":(?:null|\d+)\}\}\n\n\Z')


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


def tokens_used(end: AnswerEnd | None, reserved: int) -> int:
    """Return how many tokens an answer took, by its end, or by a header: what was reserved, where its reader has left before that.
    None: no server took the request.

    >>> tokens_used(AnswerEnd(b'..."usage":{"total_tokens":12}}'), 99), tokens_used(AnswerEnd(b"..."), 99), tokens_used(None, 99)
    (12, 99, 0)
    >>> tokens_used(AnswerEnd(b'..."prompt_tokens":3,"generated_tokens":4,"seed":null}}\\n\\n'), 99), tokens_used(AnswerEnd(b"", 8), 99)
    (7, 8)
    >>> tokens_used(AnswerEnd(b": total_tokens 9\\ndata: [DONE]\\n\\n"), 99)
    9
    """
    if end is None:
        return 0
    if end.tokens is not None:
        return end.tokens
    found = TOTAL.search(end.tail) or OF_COMPLETION.search(end.tail) or OF_GENERATE.search(end.tail)
    return sum(map(int, found.groups())) if found else reserved
