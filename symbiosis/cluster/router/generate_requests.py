"""What a front end reads of `/generate`, as text-generation-inference and LoRAX have it. A server that has room answers it whole."""

import msgspec

from symbiosis.cluster.router.completion_fields import with_fields
from symbiosis.server.openai_protocol import Tokens, decoded


class _Parameters(msgspec.Struct):
    """Of the parameters, what is read here. All else is skipped."""

    adapter_id: str | None = None
    max_new_tokens: Tokens | None = None


class _GenerateFields(msgspec.Struct):
    """Of a body, what is read here."""

    parameters: msgspec.Raw = msgspec.Raw()


class GenerateFields:
    """One body.

    >>> asked = GenerateFields(b'{"inputs": "a", "parameters": {"adapter_id": "python", "max_new_tokens": 8}}')
    >>> asked.model, asked.wanted
    ('python', 8)
    >>> GenerateFields(b'{"inputs": "a"}').body("demo")
    b'{"inputs": "a","parameters":{"adapter_id":"demo"}}'
    """

    def __init__(self, data: bytes) -> None:
        given = bytes(decoded(_GenerateFields, data).parameters)
        self._data, self._parameters = data, given if given not in (b"", b"null") else b"{}"
        told = decoded(_Parameters, self._parameters, "parameters")
        self.model, self.wanted = told.adapter_id, told.max_new_tokens

    def body(self, model: str) -> bytes:
        """Return it for a model of the cluster, by whatever name that was asked for."""
        parameters = msgspec.Raw(with_fields(self._parameters, {"adapter_id": model}))
        return with_fields(self._data, {"parameters": parameters})
