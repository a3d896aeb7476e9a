"""What a front end makes of a server's events for the client: events again, or one answer."""

from symbiosis.cluster.router.joined_answer import JoinedAnswer
from symbiosis.cluster.router.progress import DONE
from symbiosis.server.sse import EVENTS, JSON, Headers, SseWriter


class Form:
    """The form in which a client gets the answer to one request."""

    keeps_events = False  # until all have come
    has_begun = False

    async def give(self, outlet: SseWriter, events: list[tuple[bytes, bytes]], more: bool = True) -> None:
        """Hand over events, each as it came and without its comment."""
        raise NotImplementedError

    def may_put(self, outlet: SseWriter) -> bool:
        """Whether events that are not the last can be put."""
        return False

    def put(self, outlet: SseWriter, events: list[tuple[bytes, bytes]]) -> None:
        """Hand over events at once."""
        raise NotImplementedError

    async def refused(self, outlet: SseWriter, status: int, headers: Headers, body: bytes) -> None:
        """Answer with an error."""
        await self._start(outlet, headers, status)
        await outlet.take(body, more=False)

    async def _start(self, outlet: SseWriter, headers: Headers, status: int = 200) -> None:
        if not self.has_begun:
            self.has_begun = True
            await outlet.start(headers, status)


class Events(Form):
    """A stream.

    Args:
        shows_comments: For a client that goes on with it elsewhere itself.
    """

    def __init__(self, shows_comments: bool) -> None:
        self._shows_comments = shows_comments

    async def give(self, outlet: SseWriter, events: list[tuple[bytes, bytes]], more: bool = True) -> None:
        if events or not more:
            await self._start(outlet, EVENTS)
            await outlet.take(self._shown(events), more)

    def may_put(self, outlet: SseWriter) -> bool:
        return self.has_begun and outlet.is_free

    def put(self, outlet: SseWriter, events: list[tuple[bytes, bytes]]) -> None:
        if events:
            outlet.put(self._shown(events))

    def _shown(self, events: list[tuple[bytes, bytes]]) -> bytes:
        return b"".join([(event if self._shows_comments else told) + b"\n\n" for event, told in events])

    async def refused(self, outlet: SseWriter, status: int, headers: Headers, body: bytes) -> None:
        """Answer with an error; in the middle of a stream it is an event."""
        if self.has_begun:
            await outlet.take(b"data: " + body + b"\n\n" + DONE + b"\n\n", more=False)
        else:
            await super().refused(outlet, status, headers, body)


class Joined(Form):
    """One answer, when all of it is there."""

    keeps_events = True

    def __init__(self, whole: JoinedAnswer) -> None:
        self._whole = whole

    async def give(self, outlet: SseWriter, events: list[tuple[bytes, bytes]], more: bool = True) -> None:
        for _, told in events:
            if not told.startswith(DONE):
                self._whole.take(told)
        if not more:
            await self._start(outlet, JSON)
            await outlet.take_all(self._whole.pieces(), more=False)
