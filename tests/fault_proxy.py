"""A bad network for tests: forwards TCP to an executor, and cuts, hangs, delays, slows down or refuses connections when told.

Nothing is changed in what is forwarded. Delays are drawn from a seed. A packet that is lost is, to TCP's users, one that comes
when it has been sent again, with all that is behind it.
"""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close throws away what was not sent, and says so
CHUNK = 16 << 10
WAIT_S = 60.0
SENT_AGAIN_S = 0.2  # after this long Linux takes a packet for lost, on a network as short as this


@contextmanager
def deaf_listener() -> Iterator[str]:
    """Yield HOST:PORT of what takes no connection and refuses none, as behind a firewall that drops packets."""
    with socket.socket() as deaf, ExitStack() as stack:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(4):  # the kernel answers no more than it has room for
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        yield "{}:{}".format(*deaf.getsockname())


class FaultProxy:
    """Listens at `endpoint` and forwards to `target`, both `tcp://HOST:PORT`. A loop in a thread of its own does the work."""

    def __init__(self, target: str, seed: int = 0) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._chance = random.Random(seed)
        self.delay_s, self.jitter_s = 0.0, 0.0  # of every chunk, in each direction: delay plus or minus jitter
        self.bits_per_s = 0.0  # of each connection and direction; 0: as fast as it goes
        self.loss = 0.0  # the share of chunks that are lost once
        self.lost = 0  # chunks so far
        self.accepted = 0  # connections so far
        self._open: set[socket.socket] = set()
        self._tasks: set[asyncio.Task] = set()
        self._listener: socket.socket | None = None
        self._address = ("127.0.0.1", 0)
        self._place = self._bound()  # keeps the port ours while nobody listens
        self._address = self._place.getsockname()
        self.endpoint = "tcp://{}:{}".format(*self._address)
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self.resume()
        self.accept()

    # ------------------------------------------------------------------ what a test says

    def cut(self) -> None:
        """Reset every connection, on both sides. New ones are accepted."""
        self._run(self._cut())

    def hang(self) -> None:
        """Half-open: connections stay, new ones come in, and nothing gets through."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.set)

    def refuse(self) -> None:
        """Nobody listens any more; the connections there are go on."""
        self._run(self._refuse())

    def accept(self) -> None:
        self._run(self._accept())

    def close(self) -> None:
        self.refuse()
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
        self._place.close()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ in the loop's thread

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Let the loop's thread do it, and wait until it is done."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def _bound(self) -> socket.socket:
        place = socket.socket()
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        place.bind(self._address)
        place.setblocking(False)
        return place

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _accept(self) -> None:
        if self._listener is None:
            self._listener = self._bound()
            self._listener.listen()
            self._loop.add_reader(self._listener, self._take_in)

    def _take_in(self) -> None:
        assert self._listener
        with suppress(BlockingIOError, ConnectionError):
            client = self._listener.accept()[0]
            self.accepted += 1
            task = self._loop.create_task(self._forward(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _cut(self) -> None:
        for end in self._open:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, client: socket.socket) -> None:
        """One connection, both ways, until either side ends it."""
        executor = socket.socket()
        self._open |= {client, executor}
        ways: list[asyncio.Task] = []
        try:
            for end in (client, executor):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(executor, self._target)
            for source, sink in ((client, executor), (executor, client)):
                chance = random.Random(self._chance.random())
                ways.append(self._loop.create_task(self._way(source, sink, chance)))
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the executor is not there: so is the connection
        finally:
            for way in ways:
                way.cancel()
            for end in (client, executor):
                self._open.discard(end)
                end.close()

    async def _way(self, source: socket.socket, sink: socket.socket, chance: random.Random) -> None:
        """Chunks from `source` to `sink`, each due when it has been under way for long enough."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = self._loop.create_task(self._deliver(under_way, sink))
        due = 0.0
        try:
            while not delivery.done():
                chunk = await self._loop.sock_recv(source, CHUNK)
                await self._flows.wait()
                if self.bits_per_s:
                    await asyncio.sleep(8 * len(chunk) / self.bits_per_s)
                late_s = self.delay_s + chance.uniform(-self.jitter_s, self.jitter_s)
                if chance.random() < self.loss:
                    self.lost += 1
                    late_s += SENT_AGAIN_S
                due = max(due, self._loop.time() + late_s)
                under_way.put_nowait((due, chunk))
                if not chunk:
                    await delivery
        except OSError:
            pass
        finally:
            delivery.cancel()

    async def _deliver(self, under_way: "asyncio.Queue[tuple[float, bytes]]", sink: socket.socket) -> None:
        """... up to the empty one, which is the end."""
        with suppress(OSError):
            while (next_one := await under_way.get())[1]:
                due, chunk = next_one
                await asyncio.sleep(due - self._loop.time())
                await self._flows.wait()
                await self._loop.sock_sendall(sink, chunk)
