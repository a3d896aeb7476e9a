"""A page that the executor shares with a client that maps the weights: advice goes one way, figures the other.

0      how many other sessions decode now (255: or more)            written by the executor, once in a while
1      1 while others make tokens to which training gives way in the executor
64     what tokens the client has made directly (`Tokens`)           set by the client, cleared by the executor
128    products made directly, their rows, their multiplications    written by the client with its heartbeat
"""

import os
import socket
import struct

from symbiosis.base.ownership import peer_uid
from symbiosis.transport.base import Advice, Direct, Peer, ServerPort, Tokens
from symbiosis.transport.local.segment import Slab

NBYTES = 4096
OTHERS_AT, GIVE_WAY_AT, TOKENS_AT, FIGURES_AT = 0, 1, 64, 128
FIGURES = struct.Struct("<2Qd")  # 64 bits would not hold the multiplications of a day


class SharedPage:
    """The page, as either side sees it."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self._memory = slab.memory

    @property
    def others(self) -> int:
        return self._memory[OTHERS_AT]

    @property
    def give_way(self) -> bool:
        return self._memory[GIVE_WAY_AT] != 0

    @property
    def is_none(self) -> bool:
        return not (self._memory[OTHERS_AT] or self._memory[GIVE_WAY_AT])

    def advise(self, advice: Advice) -> None:
        self._memory[OTHERS_AT] = min(advice.others, 255)
        self._memory[GIVE_WAY_AT] = advice.give_way

    def made(self, tokens: Tokens) -> None:
        if self._memory[TOKENS_AT] < tokens:
            self._memory[TOKENS_AT] = tokens

    def report(self, calls: int, rows: int, multiplications: int) -> None:
        FIGURES.pack_into(self._memory, FIGURES_AT, calls, rows, float(multiplications))

    def read(self) -> Direct:
        """Return what the client has multiplied directly so far, and clear its note of tokens."""
        tokens = Tokens(min(self._memory[TOKENS_AT], Tokens.FEW))  # whatever it wrote
        self._memory[TOKENS_AT] = Tokens.NONE
        calls, rows, multiplications = FIGURES.unpack_from(self._memory, FIGURES_AT)
        return Direct(calls, rows, multiplications, tokens)

    def close(self) -> None:
        self.slab.close()


class Offer:
    """The executor's end: the weights that one client may map, and the page for the two of them."""

    def __init__(self, inbox: ServerPort, peer: Peer, sock: socket.socket) -> None:
        self._inbox, self._peer, self._socket = inbox, peer, sock
        self._page: SharedPage | None = None  # once the client has mapped the weights

    def descriptors(self, on_gpu: bool) -> list[int]:
        """Return the descriptors of the weights and of the page; none if weights are not shared, lie elsewhere, or the client is another
        user's."""
        weights = self._inbox.served_weights()
        elsewhere = on_gpu is not (self._inbox.device.type == "cuda")
        if not weights or elsewhere or peer_uid(self._socket) != os.getuid():
            return []
        if self._page is None:
            self._page = SharedPage(Slab.create(NBYTES))
        return [*(file.fileno() for file in weights), self._page.slab.fd]

    def counsel(self) -> None:
        """Take what the client tells of its own products, and tell it what is advised."""
        if self._page is not None and self._peer.session is not None:
            self._page.advise(self._inbox.multiplied(self._peer, self._page.read()))

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None
