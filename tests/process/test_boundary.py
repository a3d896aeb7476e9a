"""Whose folders and sockets are used, who is let in, and what messages leave behind."""

import ctypes
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis import transport
from symbiosis.base import ownership
from symbiosis.base.folders import Use, user_folder
from symbiosis.base.logs import JsonFormatter, TextFormatter
from symbiosis.base.ownership import check_folder, make_folder
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code, ConfigError, ConnectionLost
from symbiosis.protocol import (
    Beat,
    Bye,
    Call,
    Control,
    Grow,
    Grown,
    Hello,
    Op,
    Refusal,
    Segment,
    Share,
    Shared,
    decode_from_executor,
    encode_control,
)
from symbiosis.protocol.endpoints import default_endpoints
from symbiosis.transport.control_messages import received
from symbiosis.transport.cuda.driver import WordPage
from symbiosis.transport.cuda.peer import check_words
from symbiosis.transport.local.peer import FIRST_SLAB
from tests.conftest import tiny_llama
from tests.processes import until

WAIT_S = 60.0
STRANGER = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
ROWS = torch.arange(64.0).view(1, 64)


def as_user(uid: int, act: Callable[[], object]) -> str:
    """What `act` returns in a process of that user, or what it raises."""
    ours, theirs = socket.socketpair()
    if not (pid := os.fork()):
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            said = str(act())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        theirs.sendall(said.encode())
        os._exit(0)
    theirs.close()
    ours.settimeout(WAIT_S)
    with ours:
        heard = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    os.waitpid(pid, 0)
    return heard.decode()


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A folder like /tmp, which other users reach, too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


# ---------------------------------------------------------------- folders


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    make_folder(folder)
    make_folder(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_a_shared_place_itself_may_be_used_where_nobody_replaces_what_is_ours(shared_place: Path) -> None:
    check_folder(shared_place, shared=True)
    with pytest.raises(ConfigError, match="can be written by others"):
        check_folder(shared_place)
    shared_place.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        check_folder(shared_place, shared=True)


def other_users(place: Path) -> None:
    place.mkdir()
    os.chown(place, STRANGER, STRANGER)


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def open_to_a_group(place: Path) -> None:
    place.mkdir()
    place.chmod(0o770)


def a_link(place: Path) -> None:
    target = place.with_name("target")
    target.mkdir(0o700)
    place.symlink_to(target)


SQUATTED = {
    "another user's": (other_users, f"belongs to user.*{STRANGER}"),
    "open to all": (open_to_all, "can be written by others"),
    "open to a group": (open_to_a_group, "can be written by others"),
    "a link": (a_link, "is a link"),
    "a file": (Path.touch, "is not a folder"),
}


@as_root
@pytest.mark.parametrize("how", SQUATTED)
def test_what_another_user_made_beforehand_is_not_used(
    how: str, shared_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SYMBIOSIS_ENDPOINT", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(shared_place))
    squat, reason = SQUATTED[how]
    runtime = user_folder(Use.RUNTIME)
    squat(runtime)
    with pytest.raises(ConfigError, match=reason):
        default_endpoints()
    if how != "a link":  # a path that the operator wrote may lead over a link of hers
        with pytest.raises(ConfigError, match=f"{reason}|cannot make"):
            symbiosis.Executor(tiny_llama(), listen=f"local://{runtime}/executor.sock")
    with pytest.raises(ConfigError, match=reason):
        symbiosis.wrap(tiny_llama())


@as_root
def test_a_link_of_an_operators_leads_where_it_leads(tmp_path: Path) -> None:
    """... and that folder is looked at."""
    a_link(tmp_path / "run")
    with symbiosis.Executor(tiny_llama(), listen=f"local://{tmp_path}/run/executor.sock") as executor:
        assert torch.equal(Session(executor.endpoint).call(Op.ECHO, 0, ROWS), ROWS)
    os.chown(tmp_path / "target", STRANGER, STRANGER)
    with pytest.raises(ConfigError, match="belongs to"):
        symbiosis.Executor(tiny_llama(), listen=f"local://{tmp_path}/run/executor.sock")


@as_root
def test_anothers_runtime_folder_in_the_environment_is_not_used(
    shared_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `su`, or `sudo -E`."""
    other_users(theirs := shared_place / "theirs")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(theirs))
    assert user_folder(Use.RUNTIME).parent != theirs


def looks_from_a_namespace_without_root() -> object:
    libc = ctypes.CDLL(None)
    if libc.prctl(4, 1, 0, 0, 0) or libc.unshare(0x10000000):  # PR_SET_DUMPABLE: it was root's; CLONE_NEWUSER
        return "no namespace"
    Path("/proc/self/uid_map").write_text(f"{STRANGER - 1} {STRANGER - 1} 1")
    ownership._root_from_within.cache_clear()
    return Path("/").stat().st_uid, ownership.why_not_ours(Path("/tmp/not-there-yet"))


@as_root
def test_a_namespace_without_root_trusts_the_folders_that_are_roots() -> None:
    """As containers without privileges have it: there they seem to be nobody's."""
    said = as_user(STRANGER - 1, looks_from_a_namespace_without_root)
    if said == "no namespace":
        pytest.skip("this kernel gives no namespaces to users")
    overflow = Path("/proc/sys/kernel/overflowuid").read_text().strip()
    assert said == f"({overflow}, None)"


def test_a_socket_that_is_a_link_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "x.sock").symlink_to(tmp_path / "elsewhere.sock")
    with pytest.raises(ConfigError, match="is not a socket"):
        symbiosis.Executor(tiny_llama(), listen=f"local://{tmp_path}/x.sock")


# ---------------------------------------------------------------- who answers, and who comes


@as_root
def test_another_users_executor_is_sent_nothing(shared_place: Path) -> None:
    path = shared_place / "trap.sock"
    heard, say = os.pipe()
    listening, listens = os.pipe()
    if not (pid := os.fork()):
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trap:
            trap.bind(str(path))
            trap.listen()
            path.chmod(0o666)
            os.write(listens, b"x")
            trap.settimeout(WAIT_S)
            victim, _ = trap.accept()
            victim.settimeout(WAIT_S)
            os.write(say, victim.recv(4096) or b"nothing")
        os._exit(0)
    os.read(listening, 1)
    with pytest.raises(CallError, match=rf"is served by user.*{STRANGER}.*tcp:// with keys") as error:
        transport.connect(f"local://{path}", Hello(client="victim"), WAIT_S)
    assert error.value.code is Code.NOT_ALLOWED
    assert os.read(heard, 4096) == b"nothing"
    os.waitpid(pid, 0)
    for fd in (heard, say, listening, listens):
        os.close(fd)


@as_root
def test_another_user_is_told_why_it_may_not_come_in(shared_place: Path) -> None:
    path = shared_place / "executor.sock"
    with symbiosis.Executor(tiny_llama(), listen=f"local://{path}") as executor:
        path.chmod(0o666)

        def join() -> object:
            return transport.connect(f"local://{path}", Hello(client="stranger"), WAIT_S)

        for _ in range(5):  # whoever of the two is faster
            assert "own user only" in (said := as_user(STRANGER, join)), said
            assert "CallError" in said and "tcp:// with keys" in said
        assert not executor.server.sessions
        assert torch.equal(Session(executor.endpoint).call(Op.ECHO, 0, ROWS), ROWS)


def test_root_is_trusted_by_all_and_trusts_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could read their memory anyway."""
    for own, trusted in ((STRANGER, {0, STRANGER}), (0, {0})):
        monkeypatch.setattr(ownership.os, "getuid", lambda own=own: own)
        assert {uid for uid in (0, 1, 1000, STRANGER) if ownership.is_trusted(uid)} == trusted


def test_a_stranger_that_leaves_before_it_is_refused_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal cannot be sent any more."""
    with symbiosis.Executor(tiny_llama(), listen=f"local://{tmp_path}/x.sock") as executor:
        monkeypatch.setattr("symbiosis.transport.local.listener.is_trusted", lambda uid: False)
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(f"{tmp_path}/x.sock")
        with pytest.raises(CallError, match="own user only"):
            transport.connect(executor.endpoint, Hello(), WAIT_S)
        monkeypatch.undo()
        assert torch.equal(Session(executor.endpoint).call(Op.ECHO, 0, ROWS), ROWS)


# ---------------------------------------------------------------- what messages leave behind


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class Speaker:
    """Says anything over the socket of `local://`, with descriptors."""

    def __init__(self, endpoint: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(endpoint.removeprefix("local://"))

    def say(self, message: Control | bytes, attached: int = 0) -> Control:
        """The answer; `Bye` if the executor hangs up."""
        raw = message if isinstance(message, bytes) else encode_control(message)
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(attached)]
        try:
            socket.send_fds(self.socket, [raw], fds)
            with received(self.socket, decode_from_executor, 4) as (answer, _):
                return answer
        finally:
            for fd in fds:
                os.close(fd)

    def join(self) -> "Speaker":
        assert isinstance(self.say(Hello(client="speaker")), Grown)
        return self

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[symbiosis.Executor]:
    listen = f"local://{tmp_path}/executor.sock"
    with symbiosis.Executor(tiny_llama(), listen=listen, policy="immediate", max_call_bytes=16 << 20) as executor:
        innocent = Session(executor.endpoint)
        assert torch.equal(innocent.call(Op.ECHO, 0, ROWS), ROWS)
        yield executor
        assert torch.equal(innocent.call(Op.ECHO, 0, ROWS), ROWS)
        assert innocent.stats.reconnects == 0 and executor.server.ledger.errors["INTERNAL"] == 0
        innocent.close()


BEFORE: dict[str, tuple[Control | bytes, int]] = {  # what is said, and how many descriptors come with it
    "Share": (Share(), 0), "Share with a descriptor": (Share(), 1), "Grow": (Grow(1 << 20), 0),
    "Segment": (Segment(0, 4096), 1), "Bye with a descriptor": (Bye(), 1), "nonsense": (b"\xc1", 1),
    "nothing": (b"", 1), "a join with a descriptor": (Hello(), 1), "a join with ten": (Hello(), 10),
    "a GPU": (Hello(device="GPU-1"), 1), "a GPU without words": (Hello(device="GPU-1"), 0),
    "a GPU with ten": (Hello(device="GPU-1"), 10), "another version": (Hello(version=99), 0),
    "another model": (Hello(fingerprint="0" * 64), 0), "the other side's": (Shared(), 1),
    "an unknown priority": (encode_control(Hello()).replace(b"\xa8priority\xc0", b"\xa8priority\x77"), 0),
}  # fmt: skip
AFTER: dict[str, tuple[Control | bytes, int]] = {
    "a second join": (Hello(), 0), "a second join of a GPU": (Hello(device="GPU-1"), 1), "a beat": (Beat(), 1),
    "Share with a descriptor": (Share(), 1), "Grow with a descriptor": (Grow(2 * FIRST_SLAB), 1),
    "Grow to less": (Grow(1), 0), "Grow to too much": (Grow(1 << 40), 0), "Segment": (Segment(0, 4096), 1),
    "ten descriptors": (Share(), 10), "nothing, with a descriptor": (b"", 1),
}  # fmt: skip


@pytest.mark.parametrize("state", ["before", "after"])
def test_what_is_said_at_the_wrong_time_leaves_nothing_open(state: str, executor: symbiosis.Executor) -> None:
    messages = BEFORE if state == "before" else AFTER
    executor.server.store.commons()
    sessions, open_before = len(executor.server.sessions), descriptors()
    for turn in range(1000):
        speaker = Speaker(executor.endpoint)
        if state == "after":
            speaker.join()
        message, attached = messages[list(messages)[turn % len(messages)]]
        answer = speaker.say(message, attached)
        assert isinstance(answer, Refusal | Bye), (message, answer)
        speaker.close()
    until(lambda: len(executor.server.sessions) == sessions and descriptors() <= open_before, "the end of all of them")


def test_a_thousand_messages_of_one_client_leave_nothing_open(executor: symbiosis.Executor) -> None:
    executor.server.store.commons()
    speaker = Speaker(executor.endpoint).join()
    open_before = descriptors()
    for _ in range(1000):
        assert isinstance(speaker.say(Share()), Shared)
    for nbytes in (2 * FIRST_SLAB, 4 * FIRST_SLAB):
        assert speaker.say(Grow(nbytes)) == Grown(nbytes)
    until(lambda: descriptors() <= open_before, "the closing of smaller segments")
    speaker.close()


def test_a_client_that_does_not_read_its_answers_is_ended(executor: symbiosis.Executor) -> None:
    """Descriptors on their way count as open ones of this user's."""
    speaker = Speaker(executor.endpoint).join()
    with pytest.raises(ConnectionError):
        for _ in range(100_000):
            speaker.socket.send(encode_control(Share()))
    until(lambda: len(executor.server.sessions) == 1, "its end")
    speaker.close()


def test_a_segment_does_not_grow_during_a_call(executor: symbiosis.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may be copying from it."""
    monkeypatch.setattr(executor.server.dispatch, "arrived", lambda *words: None)  # it is not answered
    session = Session(executor.endpoint, timeout=0.2, patience=0.1)
    with pytest.raises(ConnectionLost):
        session.call(Op.ECHO, 0, ROWS)
    session.close()
    connection: Any = transport.connect(executor.endpoint, Hello(client="grows"), WAIT_S)
    with pytest.raises(ConnectionLost, match="no answer"):
        connection.call(1, Call(Op.ECHO, 0, "float32", (1, 64)), (ROWS,), 0.05)
    with pytest.raises(CallError, match="not during one"):
        connection._grow(2 * FIRST_SLAB)
    connection.close()
    monkeypatch.undo()


def test_words_that_could_be_taken_away_are_refused() -> None:
    """Whoever reads from a page that a client has cut off is killed by the system."""
    for flags, nbytes in (
        (os.MFD_CLOEXEC, WordPage.nbytes),
        (os.MFD_ALLOW_SEALING, WordPage.nbytes),
        (os.MFD_CLOEXEC, 0),
    ):
        fd = os.memfd_create("words", flags)
        os.ftruncate(fd, nbytes)
        with pytest.raises(CallError, match="sealed against shrinking"):
            check_words(fd)
        os.close(fd)
    with Path(os.devnull).open() as file, pytest.raises(CallError, match="sealed"):
        check_words(file.fileno())


# ---------------------------------------------------------------- mistakes of ours


class Mistake(Exception):
    """Nothing that anybody expects."""


def a_mistake(*_: object) -> None:
    raise Mistake


WHERE = {
    "taking a call": "symbiosis.executor.dispatch.Dispatch.admits",
    "reading a call": "symbiosis.executor.dispatch.Dispatch.arrived",
    "joining": "symbiosis.executor.dispatch.Dispatch.joined",
    "answering": "symbiosis.executor.compute.batch_runner.BatchRunner._reply",
    "telling figures": "symbiosis.executor.loop.ExecutorLoop.snapshot",
}


@pytest.mark.parametrize("where", WHERE)
def test_a_mistake_of_ours_ends_one_session_and_not_the_loop(
    where: str, url: str, serve: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = serve(tiny_llama(), listen=[url], policy="immediate")
    innocent, victim = (Session(executor.endpoint, timeout=5.0, patience=0.5) for _ in range(2))
    assert torch.equal(innocent.call(Op.ECHO, 0, ROWS), ROWS)
    assert victim.welcome
    with monkeypatch.context() as patch:
        patch.setattr(WHERE[where], a_mistake)
        if where == "joining":
            victim = Session(executor.endpoint, patience=0.2)
            monkeypatch.setattr("symbiosis.client.connection.reconnect.JOIN_S", 0.5)
        with pytest.raises((ConnectionLost, CallError)):
            victim.call(Op.STATS if where == "telling figures" else Op.ECHO, 0, *([] if "figures" in where else [ROWS]))
    assert torch.equal(innocent.call(Op.ECHO, 0, ROWS), ROWS)
    assert innocent.stats.reconnects == 0
    assert executor.server.ledger.errors["INTERNAL"] >= 1
    if where != "telling figures":  # that is refused with a code
        assert "Mistake" in caplog.text and "Traceback" in caplog.text
    for session in (innocent, victim):
        session.close()
    until(lambda: not executor.server.sessions, "the leaving of both")


def test_mistakes_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with symbiosis.Executor(tiny_llama()) as executor:
        for _ in range(100):
            executor.server.reactor.call_soon(a_mistake)
        until(lambda: executor.server.ledger.errors["INTERNAL"] == 100, "the last of them")
        assert torch.equal(Session(executor.endpoint).call(Op.ECHO, 0, ROWS), ROWS)
    assert caplog.text.count("please report it") == 7  # the 1st, 2nd, 4th, ...


def test_both_formats_of_the_log_tell_where_a_mistake_was() -> None:
    try:
        a_mistake()
    except Mistake:
        record = logging.LogRecord("symbiosis", logging.ERROR, "", 0, "a mistake", (), sys.exc_info())
    assert TextFormatter().format(record).splitlines()[1].startswith("Traceback")
    assert "in a_mistake" in json.loads(JsonFormatter().format(record))["traceback"]


def test_a_broken_device_ends_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    with symbiosis.Executor(tiny_llama()) as executor:
        monkeypatch.setattr("symbiosis.executor.compute.batch_runner.Launcher.works", False)
        monkeypatch.setattr("threading.excepthook", lambda _: None)
        executor.server.reactor.call_soon(a_mistake)
        until(lambda: not executor._thread.is_alive(), "its end")
        assert isinstance(executor.server._failure, Mistake)


def test_a_ctrl_c_is_no_mistake() -> None:
    loop = transport.Reactor(lambda peer, error: pytest.fail(f"{error} was swallowed"))

    def interrupt() -> None:
        raise KeyboardInterrupt

    loop.call_soon(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.poll(1.0)
    loop.close()


def test_whoever_cannot_be_ended_either_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Peer:
        close = a_mistake

    heard: list[object] = []
    loop = transport.Reactor(lambda peer, error: heard.append(peer))
    assert loop.attempt(peer := Peer(), a_mistake) is None
    assert heard == [peer, None]
    loop.close()
