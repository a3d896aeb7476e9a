"""`tcp://` for clients on a GPU of another host, the client's end: rows come and go by NCCL, from GPU to GPU.

A call waits for its answer, like any other over `tcp://`. If the executor dies meanwhile, the call is simply made again.
"""

import select
import socket
import threading
from contextlib import suppress
from time import monotonic

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.errors import Code, ConnectionLost
from symbiosis.protocol import REPLY_SIZE, Call, Hello, Reply, decode_reply, encode_call
from symbiosis.transport.cuda.driver import device_name
from symbiosis.transport.nccl import driver as nccl_driver
from symbiosis.transport.nccl.driver import Communicator, NcclError, communicator_within
from symbiosis.transport.patience import CONNECT_S
from symbiosis.transport.reactor import spin
from symbiosis.transport.tcp.client import BEAT_S, TcpConnection
from symbiosis.transport.tensors import TORCH_DTYPE, Shapes, bytes_tensor, cut

MEET_S = 30.0  # that the executor's GPU may take to answer
ABORT_S = 5.0  # that a broken communicator may take to end


class NcclConnection(TcpConnection):
    """Sends rows on `device` by NCCL, and rows on the CPU as frames."""

    def __init__(self, address: str, hello: Hello, timeout: float, device: torch.device, room: int = -1) -> None:
        self._side: socket.socket | None = None
        self._comm: Communicator | None = None
        super().__init__(
            address, replace(hello, device=device_name(device), nccl=nccl_driver.version()), timeout, room=room
        )
        self.device = device
        try:
            self._side = socket.create_connection((self.host, self.welcome.port), CONNECT_S)
            self._side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            meeting = nccl_driver.new_unique()
            self._side.sendall(nccl_driver.shown(self.welcome.token) + meeting)
            self._woken = select.poll()
            self._woken.register(self._side, select.POLLIN)
            self._side.setblocking(False)  # with a timeout every look would wait
            self._comm = communicator_within(MEET_S, meeting, 0, device, self.beat)
        except OSError as error:
            self.close()
            raise NcclError(f"port {self.welcome.port} of {self.host} cannot be reached: {error}") from None
        except BaseException:
            self.close()
            raise

    def call(
        self, seq: int, call: Call, payload: tuple[Tensor, ...], timeout: float, shapes: Shapes = ()
    ) -> tuple[Reply, list[Tensor]]:
        if not payload or payload[0].device != self.device:
            return super().call(seq, call, payload, timeout, shapes)
        assert self._side is not None and self._comm is not None
        deadline = monotonic() + timeout
        stream = torch.cuda.current_stream(self.device)
        try:
            sent = [rows.contiguous() for rows in payload]
            assert tuple(rows.nbytes for rows in sent) == call.parts, "the executor would wait for other rows"
            self._side.sendall(encode_call(call, seq))
            for rows in sent:
                self._comm.send(rows, stream.cuda_stream)
            reply = decode_reply(self._read(REPLY_SIZE, deadline))
            if reply.seq != seq:
                raise ConnectionLost(f"the answer to call {reply.seq} came for {seq}")
            self._answers.check(call, reply)
            if reply.code is not Code.OK:
                return reply, [bytes_tensor(self._read(reply.nbytes, deadline))]
            result = torch.empty(reply.shape, dtype=TORCH_DTYPE[reply.dtype], device=self.device)
            self._comm.receive(result, stream.cuda_stream)
            self._wait(stream, deadline)
        except ConnectionLost:
            raise
        except (OSError, NcclError) as error:
            raise ConnectionLost(f"the connection broke: {error}") from None
        return reply, cut(result, shapes)

    def _read(self, nbytes: int, deadline: float) -> bytes:
        """Read the next bytes. Look for them for a while before sleeping, because waking up takes longer than most calls."""
        assert self._side is not None
        raw = b""
        while len(raw) < nbytes:
            if not spin(self._something_came):
                while not self._woken.poll(1e3 * BEAT_S):
                    self._give_up_after(deadline)
                    self.beat()
            came = self._side.recv(nbytes - len(raw))
            if not came:
                raise ConnectionLost("it hung up")
            raw += came
        return raw

    def _something_came(self) -> bool:
        assert self._side is not None
        try:
            self._side.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True  # be it the end

    def _wait(self, stream: torch.cuda.Stream, deadline: float) -> None:
        """Wait until the result is there."""
        while not spin(stream.query):
            if self._something_came():  # nothing is due: it is the end
                raise ConnectionLost("it hung up")
            self._give_up_after(deadline)

    def _give_up_after(self, deadline: float) -> None:
        if monotonic() > deadline:
            raise ConnectionLost("no answer in time")

    def close(self) -> None:
        super().close()
        if self._side is not None:
            self._side.close()
        comm, self._comm = self._comm, None
        if comm is not None:
            with suppress(RuntimeError):  # an interpreter that ends starts no threads
                ending = threading.Thread(target=comm.abort, name="symbiosis-abort", daemon=True)
                ending.start()
                ending.join(ABORT_S)
