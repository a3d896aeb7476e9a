"""The ways between client and executor. `connect` and `listen` choose one by its URL; no code outside this package knows which it
is."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from symbiosis.errors import CallError, Code
from symbiosis.protocol import Hello
from symbiosis.protocol.endpoints import is_within_process, of_rank, parts_of, socket_path
from symbiosis.transport.base import Connection, Listener, Peer, ServerPort, Sharing
from symbiosis.transport.patience import Reason, unavailable
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tensors import CPU

if TYPE_CHECKING:
    from symbiosis.transport.cuda.client import CudaConnection

__all__ = [
    "Connection",
    "ServerPort",
    "Listener",
    "Peer",
    "Reactor",
    "check_endpoint",
    "connect",
    "is_within_process",
    "listen",
    "may_come_back",
    "may_go_by_nccl",
    "may_have_lines",
    "of_rank",
    "open_line",
    "parts_of",
]
logger = logging.getLogger("symbiosis")


def connect(url: str, hello: Hello, timeout: float, device: torch.device = CPU, room: int = -1) -> Connection:
    """Join the executor at `url` for rows on `device`, or raise `ConnectionLost` if nobody answers within `timeout` seconds. A `room`
    of 0 or more limits the bytes of a reply."""
    scheme, address = parts_of(url)
    if scheme == "inproc":
        from symbiosis.transport import inproc

        return inproc.connect(address, hello, timeout)
    if scheme == "local":
        from symbiosis.transport.local.client import LocalConnection

        return LocalConnection(address, hello, timeout)
    _must_be_tcp(scheme)
    from symbiosis.transport.tcp.client import TcpConnection

    by_nccl = _by_nccl(address, hello, timeout, device, room) if device.type == "cuda" and may_go_by_nccl(url) else None
    return by_nccl or TcpConnection(address, hello, timeout, device.type == "cuda", room)


def may_come_back(url: str) -> bool:
    """Whether an executor that is not at `url` may be there later."""
    if not is_within_process(url):
        return True
    from symbiosis.transport import inproc

    return inproc.may_come_back(parts_of(url)[1])


def check_endpoint(url: str) -> None:
    """Raise `ConfigError` for what is no endpoint, so that one of several is not found out when the others are gone."""
    scheme, address = parts_of(url)
    if scheme == "tcp":
        from symbiosis.transport.tcp.address import Address

        Address.parse(address)


def may_go_by_nccl(url: str) -> bool:
    """Whether `connect` may use NCCL for rows on a GPU."""
    scheme, address = parts_of(url)
    if scheme != "tcp":
        return False
    from symbiosis.transport.tcp.address import Address

    return Address.parse(address).nccl


def may_have_lines(url: str) -> bool:
    """Whether a GPU's calls may go by a line, for which the executor must share memory with its clients."""
    return socket_path(url) is not None


def _by_nccl(address: str, hello: Hello, timeout: float, device: torch.device, room: int) -> Connection | None:
    """Return a connection over NCCL. If there cannot be one, log why and return None."""
    from symbiosis.transport.nccl.client import NcclConnection

    try:
        return NcclConnection(address, hello, timeout, device, room)
    except (CallError, RuntimeError) as error:  # NCCL and CUDA raise RuntimeError
        if isinstance(error, CallError) and error.code is not Code.UNKNOWN_OP:
            raise
        logger.warning("tcp://%s: rows of %s go through the host's memory, which is slow: %s", address, device, error)
        return None


def open_line(
    url: str, hello: Callable[[], Hello], device: torch.device, patience: float, sharing: Sharing | None = None
) -> "CudaConnection | None":
    """Return a line for a GPU's calls that no CPU waits for. If they must go through the host's memory, log why and return None.
    `sharing` is given if the session wants to map the weights."""
    if not may_have_lines(url) or device.type != "cuda":
        return None
    from symbiosis.transport.cuda.client import CudaConnection
    from symbiosis.transport.cuda.driver import CudaError
    from symbiosis.transport.cuda.handshake import Joining

    try:
        return CudaConnection(Joining(parts_of(url)[1], hello, device, patience, sharing))
    except (CallError, CudaError) as error:
        logger.warning("%s: calls of %s go through the host's memory, which is slow: %s", url, device, error)
        return None
    except OSError as error:
        raise unavailable({url: Reason.of(error)}) from None


def listen(url: str, reactor: Reactor, inbox: ServerPort) -> Listener:
    """Answer at `url`. Events on its descriptors are handled in `reactor`, and messages go to `inbox`."""
    scheme, address = parts_of(url)
    if scheme == "inproc":
        from symbiosis.transport import inproc

        return inproc.InprocListener(address, reactor, inbox)
    if scheme == "local":
        from symbiosis.transport.local import listener as local

        return local.LocalListener(address, reactor, inbox)
    _must_be_tcp(scheme)
    from symbiosis.transport.tcp import listener as zeromq

    return zeromq.TcpListener(address, reactor, inbox)


def _must_be_tcp(scheme: str) -> None:
    if scheme != "tcp":
        raise NotImplementedError(f"no transport is written for {scheme}://: add it to symbiosis/transport/__init__.py")
