"""What a front end reads of a request for vectors, classes, scores or tokens of texts. A server that has room answers it whole."""

import msgspec

from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router.completion_fields import BYTES_PER_TOKEN, counts
from symbiosis.server.openai_protocol import decoded


class _PooledFields(msgspec.Struct):
    """Of a body, what is read here. All else is skipped."""

    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    items: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()
    data_1: msgspec.Raw = msgspec.Raw()
    data_2: msgspec.Raw = msgspec.Raw()


class PoolingFields:
    """One body: how many texts it has, and about how many tokens they are together.

    >>> asked = PoolingFields(b'{"model": "m", "query": "one", "documents": ["a text, of course", "two"], "input": null}')
    >>> asked.model, asked.texts, asked.tokens, asked.field
    ('m', 3, 8, 'documents')
    """

    def __init__(self, data: bytes) -> None:
        fields = decoded(_PooledFields, data)
        self.model, chat = fields.model, bytes(fields.messages)
        lists = {name: bytes(getattr(fields, name)) for name in _PooledFields.__struct_fields__[2:]}
        found = {name: counts(given, name) for name, given in lists.items() if given not in (b"", b"null")}
        if chat not in (b"", b"null"):
            found["messages"] = 1, len(chat) // BYTES_PER_TOKEN
        self.texts, self.tokens = (sum(each) for each in zip((0, 0), *found.values(), strict=True))
        self.field = max(found, key=lambda name: found[name], default="input")  # which has the most of them

    def wish(self, model: str, adapter: str | None, tenant: str, most: float) -> RoutingRequest:
        """Return what it needs of a server, by how many sequences of one request some server takes."""
        is_vain = self.texts > most
        return RoutingRequest(
            model=model, adapter=adapter, sequences=self.texts, pages=0 if is_vain else self.tokens, tenant=tenant, is_vain=is_vain,
        )  # fmt: skip
