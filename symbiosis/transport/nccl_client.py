"""`tcp://` for clients on a GPU of another host, the client's end: rows come and go by NCCL, from GPU to GPU.

A call waits for its answer, like any other over `tcp://`: so one whose executor dies is simply made again.
"""

import select
import socket
import threading
from time import monotonic

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.errors import Code, ConnectionLost, ProtocolError
from symbiosis.protocol import REPLY_SIZE, Call, Hello, Reply, decode_reply, encode_call
from symbiosis.transport import nccl_driver
from symbiosis.transport.curve import Address
from symbiosis.transport.nccl_driver import Communicator, NcclError, met
from symbiosis.transport.reactor import spin
from symbiosis.transport.tensors import TORCH_DTYPE, Shapes, cut
from symbiosis.transport.zeromq_client import BEAT_S, TcpConnection

ABORT_S = 5.0  # that a broken communicator may take to end
PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT


class NcclConnection(TcpConnection):
    """Rows on `device` go by NCCL, those on the CPU as frames."""

    def __init__(self, address: str, hello: Hello, timeout: float, device: torch.device) -> None:
        self._side: socket.socket | None = None
        self._comm: Communicator | None = None
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        super().__init__(address, replace(hello, device=uuid, nccl=nccl_driver.version()), timeout)
        self.device = device
        host = Address.parse(address).where.rpartition(":")[0].strip("[]")
        try:
            self._side = socket.create_connection((host, self.welcome.port), timeout)
            self._side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            meeting = nccl_driver.new_unique()
            self._side.sendall(self.welcome.token + meeting)
            self._comm = met(meeting, 0, device)
        except OSError as error:
            self.close()
            raise ConnectionLost(f"{self._url} was left before rows could go by NCCL: {error}") from None
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
            self._side.sendall(encode_call(call, seq))
            sent = [rows.contiguous() for rows in payload]
            for rows in sent:
                self._comm.send(rows, stream.cuda_stream)
            reply = decode_reply(self._read(REPLY_SIZE, deadline))
            if reply.seq != seq:
                raise ProtocolError(Code.BAD_FRAME, f"the answer to call {reply.seq} came for {seq}")
            if reply.code is not Code.OK:
                text = torch.frombuffer(bytearray(self._read(reply.nbytes, deadline)), dtype=torch.uint8)
                return reply, [text]
            result = torch.empty(reply.shape, dtype=TORCH_DTYPE[reply.dtype], device=self.device)
            self._comm.receive(result, stream.cuda_stream)
            self._wait(stream, deadline)
        except (OSError, NcclError) as error:
            raise ConnectionLost(f"the connection to {self._url} broke: {error}") from None
        return reply, cut(result, shapes)

    def _read(self, nbytes: int, deadline: float) -> bytes:
        """What comes next. Waking up takes longer than most calls: so look for a while first."""
        assert self._side is not None
        raw = b""
        while len(raw) < nbytes:
            if not spin(self._something_came):
                while not select.select([self._side], [], [], BEAT_S)[0]:
                    self._give_up_after(deadline)
                    self.beat()
            came = self._side.recv(nbytes - len(raw))
            if not came:
                raise ConnectionLost(f"the executor at {self._url} hung up")
            raw += came
        return raw

    def _something_came(self) -> bool:
        assert self._side is not None
        try:
            self._side.recv(1, PEEK)
        except BlockingIOError:
            return False
        return True  # be it the end

    def _wait(self, stream: torch.cuda.Stream, deadline: float) -> None:
        """Until the result is there."""
        while not spin(stream.query):
            if self._something_came():  # nothing is due: it is the end
                raise ConnectionLost(f"the executor at {self._url} hung up")
            self._give_up_after(deadline)

    def _give_up_after(self, deadline: float) -> None:
        if monotonic() > deadline:
            raise ConnectionLost(f"no answer from {self._url} in time")

    def close(self) -> None:
        super().close()
        if self._side is not None:
            self._side.close()
        comm, self._comm = self._comm, None
        if comm is not None:
            ending = threading.Thread(target=comm.abort, name="symbiosis-abort", daemon=True)
            ending.start()
            ending.join(ABORT_S)
