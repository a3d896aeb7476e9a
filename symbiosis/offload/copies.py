"""Copies between a GPU and the host's memory, which run while the GPU computes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from symbiosis.offload.host_blocks import TokenShape

PIECE_BYTES = 1 << 26  # that come back at once; there are two such pieces


class Copies:
    """One stream for all copies of a cache's keys and values, in their order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._written: torch.cuda.Event | None = None
        self._rooms: dict[TokenShape, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def behind(self, *tensors: Tensor) -> Iterator[None]:
        """Copy in the block, once the tensors are computed. They stay until then."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
            self._written = self._stream.record_event()
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def wait(self, for_few: bool = False) -> None:
        """Return when what was copied is in the host's memory. With `for_few`, wait also for copies of few rows, which the current stream
        makes."""
        if for_few:
            torch.cuda.current_stream(self._stream.device).synchronize()
        if self._written is not None:
            self._written.synchronize()
            self._written = None

    def brought(
        self, parts: Iterable[tuple[int, Tensor, Tensor]], shape: TokenShape
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield keys and values on the GPU, several blocks at once: while it looks at one piece, the next one comes."""
        current = torch.cuda.current_stream(self._stream.device)
        if shape not in self._rooms:
            self._rooms[shape] = [self._room(shape) for _ in range(2)]
        room = self._rooms[shape]
        done: list[torch.cuda.Event | None] = [None, None]
        coming: tuple[int, Tensor, Tensor, torch.cuda.Event] | None = None
        self._stream.wait_stream(current)  # which may still look at what is there
        for number, group in enumerate(_groups(parts, len(room[0][0]))):
            turn = number % 2
            if (event := done[turn]) is not None:
                self._stream.wait_event(event)
            after = self._fetch(group, room[turn])
            if coming is not None:
                yield self._arrived(coming, current)
                done[1 - turn] = current.record_event()
            coming = after
        if coming is not None:
            yield self._arrived(coming, current)

    def _arrived(
        self, coming: tuple[int, Tensor, Tensor, torch.cuda.Event], current: torch.cuda.Stream
    ) -> tuple[int, Tensor, Tensor]:
        first, keys, values, event = coming
        current.wait_event(event)
        return first, keys, values

    def _room(self, shape: TokenShape) -> tuple[Tensor, Tensor]:
        tokens = max(shape.tokens, PIECE_BYTES // shape.token_bytes // shape.tokens * shape.tokens)
        device, dtype = self._stream.device, shape.dtype
        return (
            torch.empty(tokens, shape.heads, shape.key, device=device, dtype=dtype),
            torch.empty(tokens, shape.heads, shape.value, device=device, dtype=dtype),
        )

    def _fetch(
        self, group: list[tuple[int, Tensor, Tensor]], room: tuple[Tensor, Tensor]
    ) -> tuple[int, Tensor, Tensor, torch.cuda.Event]:
        at = 0
        with torch.cuda.stream(self._stream):
            for _, keys, values in group:
                room[0][at : at + len(keys)].copy_(keys, non_blocking=True)
                room[1][at : at + len(keys)].copy_(values, non_blocking=True)
                at += len(keys)
            return group[0][0], room[0][:at], room[1][:at], self._stream.record_event()


def _groups(parts: Iterable[tuple[int, Tensor, Tensor]], tokens: int) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
    """Yield groups of parts that follow one another, each of at most `tokens` tokens in all."""
    group: list[tuple[int, Tensor, Tensor]] = []
    for part in parts:
        if group and sum(len(keys) for _, keys, _ in group) + len(part[1]) > tokens:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


class AllCopies:
    """The copies of one cache, by the GPU; a model may have layers on several."""

    def __init__(self) -> None:
        self._copies: dict[torch.device, Copies] = {}

    def of(self, device: torch.device) -> Copies:
        if device not in self._copies:
            self._copies[device] = Copies(device)
        return self._copies[device]
