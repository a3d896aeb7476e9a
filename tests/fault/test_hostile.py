"""Clients that mean harm, over tcp://, against an executor in a process of its own: what they cost is bounded, nobody else notices."""

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import zmq

from symbiosis.base.curve_keys import generate
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code, ConnectionLost
from symbiosis.protocol import (
    MAGIC_REPLY,
    Beat,
    Bye,
    Call,
    Hello,
    Op,
    Refusal,
    Welcome,
    decode_from_executor,
    decode_reply,
    encode_call,
    encode_control,
)
from symbiosis.transport.tcp import connection_monitor
from symbiosis.transport.tcp.address import Address
from symbiosis.transport.tcp.connection_monitor import FIRST_BYTES
from symbiosis.transport.tcp.listener import REFUSALS
from symbiosis.transport.tcp.tenant_auth import MORE_THAN_JOIN
from tests.conftest import tiny_llama
from tests.processes import Bystander, Executor, killed_at_the_end, p99, save_tiny_llama, until
from tests.realm import ECHO, WAIT_S, Raw, Realm, echoes
from tests.zmtp import Stream

MIB = 1 << 20
SLOWER, BUSY_S = 5.0, 0.02  # the p99 of others beside those who mean harm, over that without; and a machine's own
OPTIONS = ("--policy=immediate", "--max-call-bytes=4000000", "--heartbeat-s=60")


class Town:
    """An executor as a process, with keys for alice, bob and mallory; and without."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, tenants = folder, folder / "tenants"
        tenants.mkdir()
        for name in ("executor", "alice", "bob", "mallory"):
            _, public = generate(name, folder)
            if name != "executor":
                (tenants / public.name).write_bytes(public.read_bytes())
        keys = (f"--key={folder}/executor.key", f"--tenants={tenants}")
        self.executor = Executor(
            save_tiny_llama(folder / "model"), "--listen=tcp://127.0.0.1:0", *OPTIONS, *keys, *options,
            log=folder / "log",
        )  # fmt: skip

    def endpoint(self, name: str) -> str:
        return f"{self.executor.endpoint}?server={self.folder}/executor.pub&key={self.folder}/{name}.key"


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with killed_at_the_end() as processes:
        town = Town(tmp_path)
        processes.append(town.executor)
        yield town


@pytest.fixture
def open_house(tmp_path: Path) -> Iterator[Executor]:
    """An executor without keys, on loopback."""
    with killed_at_the_end() as processes:
        model = save_tiny_llama(tmp_path / "model")
        processes.append(Executor(model, "--listen=tcp://127.0.0.1:0", *OPTIONS, log=tmp_path / "log"))
        yield processes[0]  # type: ignore[misc]


def peak_bytes(pid: int) -> int:
    """The most memory that the process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


# ---------------------------------------------------------------- floods


def test_who_does_not_heed_refusals_is_hung_up_on_and_barred_for_a_while(town: Town) -> None:
    with Bystander(town.endpoint("bob"), tiny_llama()) as bob, Bystander(town.endpoint("alice"), tiny_llama()) as alice:
        mallory = Raw(town.endpoint("mallory"))
        mallory.join()
        for number in range(REFUSALS * 50):
            mallory.send(number)
            if mallory.was_hung_up_on:
                break
        until(lambda: mallory.was_hung_up_on, "the end of the connection")
        mallory.close()
        again = Session(town.endpoint("mallory"))
        until(lambda: is_served(again), "the end of the bar")
        bob.goes_on()
        alice.goes_on()
        assert "tenant mallory ignores refusals" in town.executor.log.read_text()
        again.close()


def is_served(session: Session) -> bool:
    try:
        return echoes(session)
    except ConnectionLost:
        return False


def test_who_waits_as_told_is_never_hung_up_on(tmp_path: Path) -> None:
    """Ever so many refusals, each heeded."""
    realm = Realm(tmp_path, max_tenant_in_flight=1)
    raw = Raw(realm.endpoint("alice"))
    raw.join()
    account = realm.executor.server.sessions.accounts["alice"]
    account.in_flight += 1
    for number in range(REFUSALS + 20):
        raw.send(number)
        reply = decode_reply(raw.socket.recv_multipart()[0])
        assert reply.code is Code.BUSY
        time.sleep(reply.wait_us / 1e6)
    account.in_flight -= 1
    raw.send(0)
    assert raw.codes(1) == [Code.OK]
    assert not raw.was_hung_up_on
    raw.close()
    realm.executor.close()


def test_joins_without_leaving_are_counted_until_they_are_silent_for_too_long(tmp_path: Path) -> None:
    realm = Realm(tmp_path, max_tenant_sessions=5, heartbeat_s=1.0)
    realm.let_in("bob")
    with Bystander(realm.endpoint("bob"), tiny_llama()) as bob:
        answers = []
        for _ in range(20):
            raw = Raw(realm.endpoint("alice"))
            answers.append(raw.join())
            raw.close()  # without a word
        assert sum(isinstance(answer, Welcome) for answer in answers) >= 5
        refusals = [answer for answer in answers if isinstance(answer, Refusal)]
        assert all(refusal.code == Code.LIMIT and "5 sessions" in refusal.message for refusal in refusals)
        assert len(realm.executor.server.sessions) <= 6
        until(lambda: len(realm.executor.server.sessions) == 1, "the end of the silent sessions")
        assert isinstance(Raw(realm.endpoint("alice")).join(), Welcome)
        bob.goes_on()
    realm.executor.close()


# ---------------------------------------------------------------- memory


def test_replies_that_nobody_reads_are_few(town: Town) -> None:
    with Bystander(town.endpoint("bob"), tiny_llama()) as bob:
        large = Call(Op.ECHO, 0, "float32", (1800, 512))
        reader = Raw(town.endpoint("mallory"))
        reader.socket.rcvhwm = 1
        reader.join()
        bob.goes_on()  # what his first step takes is not the reader's
        before = town.executor.resident_bytes
        for number in range(60):
            reader.send(number, large)
        until(lambda: not reader.socket.poll(0, zmq.POLLOUT) or calls_refused(town), "a refusal")
        bob.goes_on()
        # calls that are still being read go after a while; replies that nobody reads would stay
        until(lambda: town.executor.resident_bytes - before < 12 * large.nbytes, "little memory")
        reader.close()


def calls_refused(town: Town) -> bool:
    return '"BUSY"' in town.executor.log.read_text()


@pytest.mark.parametrize("joined", [True, False])
def test_a_message_that_never_ends_is_ended(joined: bool, open_house: Executor) -> None:
    with Bystander(open_house.endpoint, tiny_llama()) as innocent:
        before = peak_bytes(open_house.pid)
        stream = Stream(open_house.endpoint)
        if joined:
            stream.join()
        most = 4096 * MIB
        sent = stream.send_until_hung_up(most)
        assert FIRST_BYTES < sent < most
        innocent.goes_on()
        grown = peak_bytes(open_house.pid) - before
        # How much comes in between two looks at the wire is the network's to say; small frames take some times their own size.
        assert grown < 4 * sent + 256 * MIB, f"{grown / MIB:.0f} MiB for {sent / MIB:.0f} MiB sent"


def test_a_message_of_very_many_frames_is_not_kept(open_house: Executor) -> None:
    with Bystander(open_house.endpoint, tiny_llama()) as innocent:
        raw = Raw(open_house.endpoint)
        raw.join()
        raw.socket.send_multipart([encode_call(ECHO, 1)] + [b"x"] * 200_000)
        until(lambda: raw.was_hung_up_on, "the end of the connection")
        innocent.goes_on()
        raw.close()


@pytest.mark.parametrize("rows", [1 << 36, 1 << 40, (1 << 63) - 1])
def test_a_header_that_promises_more_than_came_costs_nothing(rows: int, town: Town) -> None:
    """With keys, where rows go in pieces: no list is made of those that are promised."""
    with Bystander(town.endpoint("bob"), tiny_llama()) as bob:
        before = peak_bytes(town.executor.pid)
        raw = Raw.joined(town.endpoint("mallory"))
        for call in (Call(Op.ECHO, 0, "float32", (rows, 8)), Call(Op.FORWARD, 1, "float32", (rows, 64))):
            raw.socket.send_multipart([encode_call(call, 1), bytes(512)])
            assert raw.codes(1) == [Code.BAD_FRAME]
        bob.goes_on()
        assert peak_bytes(town.executor.pid) - before < 64 * MIB and bob.slowest_s < 5.0
        raw.close()
    assert "please report it" not in town.executor.log.read_text()


def test_a_long_control_message_is_not_taken_apart(open_house: Executor) -> None:
    """Some bytes of it may stand for many objects."""
    raw = Raw(open_house.endpoint)
    raw.socket.send(b"\x82\xa4type\xa4beat\xa1x\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20))
    assert raw.socket.poll(1e3 * WAIT_S)
    refusal = decode_from_executor(raw.socket.recv())
    assert isinstance(refusal, Refusal) and refusal.code == Code.TOO_LARGE
    raw.close()


# ---------------------------------------------------------------- descriptors


class Watch:
    """From now on: the bystander's p99, and how many cores the executor needs."""

    def __init__(self, executor: Executor, bystander: Bystander) -> None:
        self._executor, self._bystander = executor, bystander
        self._begun, self._used, self._calls = time.monotonic(), executor.cpu_seconds, len(bystander.times)

    def seen(self) -> tuple[float, float]:
        cores = (self._executor.cpu_seconds - self._used) / (time.monotonic() - self._begun)
        return p99(self._bystander.times[self._calls :]), cores


@pytest.mark.alone
@pytest.mark.fault
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("connections", "descriptors", "most_cores"),
    [
        (400, 256, 1.0),  # without a descriptor it tries again at once, in one thread, till a handshake is given up
        pytest.param(5000, 256, 1.0, marks=pytest.mark.soak),
        pytest.param(5000, 20_000, 0.5, marks=pytest.mark.soak),
    ],
)
def test_connections_that_say_nothing_keep_nobody_out_for_long(
    town: Town, connections: int, descriptors: int, most_cores: float
) -> None:
    """... also when they are more than the executor may have descriptors. The neighbour hardly notices."""
    with Bystander(town.endpoint("bob"), tiny_llama()) as bob:
        resource.prlimit(town.executor.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        host, _, port = town.executor.endpoint.removeprefix("tcp://").rpartition(":")
        watch = Watch(town.executor, bob)
        time.sleep(1.0)  # of a calm executor
        calm, cores = watch.seen()
        watch = Watch(town.executor, bob)
        silent = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(connections)]
        bob.goes_on()
        begun = time.monotonic()
        new = Session(town.endpoint("alice"))
        until(lambda: is_served(new), "service for a new client")
        assert time.monotonic() - begun < 5
        bob.goes_on()
        p99_beside, cores_beside = watch.seen()
        assert p99_beside < SLOWER * calm + BUSY_S, (p99_beside, calm)
        assert cores_beside - cores < most_cores, (cores_beside, cores)
        for connection in silent:
            connection.close()
        new.close()


def let_in(context: zmq.Context, endpoint: str) -> zmq.Socket:
    """A connection with the right keys that says nothing afterwards."""
    place = Address.parse(endpoint.removeprefix("tcp://"))
    connection = context.socket(zmq.DEALER)
    connection.linger = 0
    place.keys().unlock(connection)
    connection.connect(f"tcp://{place.where}")
    return connection


def test_a_tenants_connections_that_never_join_keep_nobody_out_for_long(town: Town) -> None:
    """300 of them, and the executor may have 256 descriptors. Handshakes are over, so ZeroMQ lets them be."""
    idle = Session(town.endpoint("alice"))
    assert echoes(idle)
    with Bystander(town.endpoint("bob"), tiny_llama()) as bob, zmq.Context() as context:
        resource.prlimit(town.executor.pid, resource.RLIMIT_NOFILE, (256, 256))
        silent = [let_in(context, town.endpoint("mallory")) for _ in range(300)]
        until(lambda: "no descriptor is left" in town.executor.log.read_text(), "a warning")
        bob.goes_on()
        new = Session(town.endpoint("alice"))
        until(lambda: is_served(new), "service for a new client")
        bob.goes_on()
        assert "session left" not in town.executor.log.read_text()  # who says nothing for a while, neither
        for connection in silent:
            connection.close()
        new.close()
    idle.close()


@pytest.mark.parametrize("keys", [True, False])
def test_who_does_not_join_is_hung_up_on(
    keys: bool, tmp_path: Path, serve: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_monitor, "UNJOINED_S", 1.0)
    realm = Realm(tmp_path)
    endpoint = realm.endpoint("alice") if keys else serve(tiny_llama(), listen=["tcp://127.0.0.1:0"]).endpoint
    joined, silent, refused = Raw.joined(endpoint), Raw(endpoint), Raw(endpoint)
    refused.socket.send(encode_control(Hello(version=0, client="raw")))
    assert isinstance(decode_from_executor(refused.socket.recv()), Refusal)
    until(lambda: silent.was_hung_up_on and refused.was_hung_up_on, "the end of connections without a session")
    joined.send(1)
    assert joined.codes(1) == [Code.OK] and not joined.was_hung_up_on
    for raw in (joined, silent, refused):
        raw.close()
    realm.executor.close()


def test_few_connections_of_a_tenant_are_in_without_a_session(tmp_path: Path) -> None:
    """Who leaves and joins again and again makes no room for more of them."""
    realm = Realm(tmp_path, max_tenant_sessions=2)
    most = 2 + MORE_THAN_JOIN
    with zmq.Context() as context:
        silent = [let_in(context, realm.endpoint("alice")) for _ in range(most - 4)]
        auth = realm.executor.server.listeners[0]._auth
        until(lambda: len(auth._let_in["alice"]) == most - 4, "the end of the handshakes")
        for _ in range(3):
            session = realm.session()
            assert echoes(session)
            session.close()
        assert len(auth._let_in["alice"]) == most - 4
        more = [let_in(context, realm.endpoint("alice")) for _ in range(8)]
        until(lambda: len(auth._held) == 4, "a queue at the door")
        assert len(auth._let_in["alice"]) == most
        for connection in (*silent, *more):
            connection.close()
    realm.executor.close()


def test_who_has_left_has_no_connection_any_more(tmp_path: Path) -> None:
    realm = Realm(tmp_path)
    raw = Raw.joined(realm.endpoint("alice"))
    raw.socket.send(encode_control(Bye()))
    until(lambda: raw.was_hung_up_on, "the end of the connection")
    raw.close()
    realm.executor.close()


def test_the_process_has_all_descriptors_that_it_may_have_and_dumps_no_core(town: Town) -> None:
    lines = Path(f"/proc/{town.executor.pid}/limits").read_text().splitlines()
    limits = {line[:25].strip(): line[25:].split()[:2] for line in lines}
    assert limits["Max core file size"] == ["0", "0"]
    soft, hard = limits["Max open files"]
    assert soft == hard


# ---------------------------------------------------------------- others' names, old messages


def test_a_key_that_now_belongs_to_somebody_else_ends_the_session(tmp_path: Path) -> None:
    realm = Realm(tmp_path)
    raw = Raw(realm.endpoint("alice"))
    raw.join()
    (realm.tenants / "alice.pub").rename(realm.tenants / "carol.pub")

    def refused() -> bool:
        raw.send(1)
        head, *_ = raw.socket.recv_multipart()
        return head[:4] != MAGIC_REPLY

    until(refused, "the refusal of a session that was alice's")
    assert not realm.executor.server.sessions
    raw.close()
    carol = Session(realm.endpoint("alice"))
    assert echoes(carol)
    assert [session.peer.tenant for session in realm.executor.server.sessions.values()] == ["carol"]
    carol.close()
    realm.executor.close()


def test_an_old_call_sent_again_is_computed_again_and_nothing_more(town: Town) -> None:
    raw = Raw(town.endpoint("mallory"))
    raw.join()
    rows = torch.arange(16.0).view(2, 8)
    for seq in (5, 5, 1, 2**63, 5):
        raw.socket.send_multipart([encode_call(ECHO, seq), rows.numpy().tobytes()])
        head, result = raw.socket.recv_multipart()
        assert (decode_reply(head).seq, decode_reply(head).code) == (seq, Code.OK)
        assert result == rows.numpy().tobytes()
    raw.close()


def test_a_recorded_connection_cannot_be_played_again(town: Town) -> None:
    host, _, port = town.executor.endpoint.removeprefix("tcp://").rpartition(":")
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=relay, args=(door, (host, int(port)), recorded))
        thread.start()
        through = town.endpoint("alice").replace(f":{port}?", f":{door.getsockname()[1]}?")
        session = Session(through)
        assert echoes(session)
        session.close()
        thread.join(WAIT_S)
    assert len(recorded) > 2560
    joins = town.executor.log.read_text().count("session joined")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as again, suppress(ConnectionError):
        again.sendall(recorded)
        while again.recv(4096):
            pass
    assert town.executor.log.read_text().count("session joined") == joins == 1


def relay(door: socket.socket, target: tuple[str, int], recorded: bytearray) -> None:
    near, _ = door.accept()
    far = socket.create_connection(target)
    answers = threading.Thread(target=pass_on, args=(far, near, bytearray()))
    answers.start()
    pass_on(near, far, recorded)
    answers.join(WAIT_S)
    near.close()
    far.close()


def pass_on(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            seen += data
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_beats_alone_keep_no_strangers_session(town: Town) -> None:
    """Who never joined has none to keep."""
    raw = Raw(town.endpoint("mallory"))
    raw.socket.send(encode_control(Beat()))
    answer = decode_from_executor(raw.socket.recv())
    assert isinstance(answer, Refusal) and answer.code == Code.NOT_JOINED
    with pytest.raises(CallError, match="only its operator may see them"):
        Session(town.endpoint("mallory")).call(Op.STATS, 0)
    raw.close()
