"""Responses that later ones may go on from, in memory: the last ones, as many as fit."""

from collections import OrderedDict
from typing import Any

import msgspec

from symbiosis.server.api_errors import ApiError, wrong

MOST_BYTES = 64 << 20
OVERHEAD = 512  # bytes of one, besides its texts


class StoredResponse(msgspec.Struct, frozen=True, gc=False):
    """One of them, as JSON: it takes little room so."""

    response: bytes
    messages: bytes  # of the whole chat, but for instructions

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages) + OVERHEAD


class ResponseStore:
    """Where there is no room, the oldest of whoever has most makes it.

    >>> store = ResponseStore()
    >>> store.put("anna", "resp_1", {"id": "resp_1"}, [{"role": "user", "content": "Hi"}])
    >>> store.messages("anna", "resp_1")
    [{'role': 'user', 'content': 'Hi'}]
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._of: dict[str, OrderedDict[str, StoredResponse]] = {}  # by tenant, the oldest first
        self._sizes: dict[str, int] = {}

    def put(self, tenant: str, id: str, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response. One that is larger than half of the room is not kept."""
        stored = StoredResponse(msgspec.json.encode(response), msgspec.json.encode(messages))
        if stored.size > self._most // 2:
            return
        if id in self._of.get(tenant, ()):
            self._drop(tenant, id)
        self._of.setdefault(tenant, OrderedDict())[id] = stored
        self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size
        while sum(self._sizes.values()) > self._most:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(largest, next(iter(self._of[largest])))

    def response(self, tenant: str, id: str) -> bytes:
        """Return one as it was told."""
        return self._found(tenant, id).response

    def messages(self, tenant: str, id: str) -> list[dict[str, Any]]:
        """Return the chat up to its end. Raises `ApiError` if it is not kept."""
        try:
            found = self._found(tenant, id)
        except ApiError:
            raise wrong(
                f"previous_response_id: there is no response {id[:100]!r} any more: send the whole input", "previous_response_id",
                "previous_response_not_found",
            ) from None  # fmt: skip
        messages: list[dict[str, Any]] = msgspec.json.decode(found.messages)
        return messages

    def remove(self, tenant: str, id: str) -> None:
        self._found(tenant, id)
        self._drop(tenant, id)

    def _found(self, tenant: str, id: str) -> StoredResponse:
        found = self._of[tenant].get(id) if tenant in self._of else None
        if found is None:
            raise ApiError(404, f"there is no response {id[:100]!r}: it was not stored, or others have taken its room")
        return found

    def _drop(self, tenant: str, id: str) -> None:
        self._sizes[tenant] -= self._of[tenant].pop(id).size
        if not self._of[tenant]:
            del self._of[tenant], self._sizes[tenant]
