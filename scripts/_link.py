"""A link of a given speed between clients and an executor on one machine: what passes waits as long as the wire would take."""

import asyncio
from time import monotonic

CHUNK = 1 << 16


class Link:
    """Forwards connections to `target` ("HOST:PORT"), each direction at `bits` per second. Lives in a process of its own."""

    def __init__(self, target: str, bits: float) -> None:
        self._host, _, port = target.rpartition(":")
        self._port, self._bytes = int(port), bits / 8
        self._loop = asyncio.new_event_loop()
        self._free = {"up": 0.0, "down": 0.0}
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))

    def address(self) -> str:
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def run(self, seconds: float) -> None:
        """Forward for so long."""
        self._loop.run_until_complete(asyncio.sleep(seconds))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(self._forward(reader, there_writer, "up"), self._forward(there_reader, writer, "down"))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        try:
            while chunk := await reader.read(CHUNK):
                self._free[way] = max(monotonic(), self._free[way]) + len(chunk) / self._bytes
                await asyncio.sleep(self._free[way] - monotonic())
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
