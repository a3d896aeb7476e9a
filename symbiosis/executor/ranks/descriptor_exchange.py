"""How ranks get the descriptors of each other's parts: each hands out those that it has, to processes of its own user, with a digest of what they
are parts of. Where it does so may be told by anybody.

On GPUs a rank keeps the descriptors of all parts, for one that is started again: CUDA exports an allocation only in the process that made it.
"""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

from symbiosis.base.ownership import peer_uid
from symbiosis.executor.observe.log import log
from symbiosis.transport.control_messages import MOST_AT_ONCE

COUNT = struct.Struct("<i")  # the number of a rank; of its descriptors, -1 if there are none, before the digest
LONGEST_DIGEST = 128
ANSWER_S = 10.0
PAUSE_S = 0.1  # after an error, which may be that no descriptor is left
BEHIND = b"+"  # what descriptors come with


class Exchange:
    """Answers at `address` for as long as this process lives."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[str, list[int]]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")  # a name that no file has, which the kernel chooses
        self._listener.listen(64)
        self.address: str = self._listener.getsockname().hex()
        threading.Thread(target=self._serve, name="symbiosis-exchange", daemon=True).start()

    def hold(self, rank: int, digest: str, descriptors: list[int]) -> None:
        """Hand out the part of a rank from now on. The descriptors stay open."""
        self._parts[rank] = digest, descriptors

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
                with sock:
                    sock.settimeout(ANSWER_S)
                    if peer_uid(sock) == os.getuid():
                        self._answer(sock)
            except (OSError, struct.error) as error:  # it is gone, or says something else
                log(logging.WARNING, "another rank did not get what it asked for", error=str(error))
                time.sleep(PAUSE_S)

    def _answer(self, sock: socket.socket) -> None:
        (rank,) = COUNT.unpack(sock.recv(COUNT.size))
        if rank not in self._parts:
            sock.send(COUNT.pack(-1))
            return
        digest, descriptors = self._parts[rank]
        sock.send(COUNT.pack(len(descriptors)) + digest.encode())
        for begin in range(0, len(descriptors), MOST_AT_ONCE):
            socket.send_fds(sock, [BEHIND], descriptors[begin : begin + MOST_AT_ONCE])


def part_of(rank: int, address: str, timeout: float = ANSWER_S) -> tuple[str, list[int]] | None:
    """Ask at `address` for the digest and descriptors of the part of a rank. None: it has none. Raises `OSError` if nobody of this user answers
    there, and `ValueError` for what is no address. The caller closes them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(timeout)
        sock.connect(bytes.fromhex(address))
        if peer_uid(sock) != os.getuid():
            raise PermissionError(f"what answers for rank {rank} is another user's")
        sock.send(COUNT.pack(rank))
        answer = sock.recv(COUNT.size + LONGEST_DIGEST)
        if len(answer) < COUNT.size:
            raise ConnectionResetError(f"what answers for rank {rank} hung up")
        (count,) = COUNT.unpack_from(answer)
        return None if count < 0 else (answer[COUNT.size :].decode("ascii"), _received(sock, count))


def _received(sock: socket.socket, count: int) -> list[int]:
    found: list[int] = []
    try:
        while len(found) < count:
            said, some, _, _ = socket.recv_fds(sock, len(BEHIND), MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
            found += some
            if said != BEHIND:
                raise ConnectionResetError("another rank hung up")
    except BaseException:
        close(found)
        raise
    return found


def close(descriptors: Sequence[int]) -> None:
    """Close them all."""
    for descriptor in descriptors:
        os.close(descriptor)
