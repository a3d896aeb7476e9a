"""`tcp://` with keys: who may come in, who is who, what is seen on the way."""

import os
import re
import resource
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from typer.testing import CliRunner

import symbiosis
from symbiosis.base import curve_keys as module
from symbiosis.base.curve_keys import SETTLED_S, Tenants, generate, moment, read_pair, read_public, read_publics
from symbiosis.cli import main
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code, ConfigError, SymbiosisError
from symbiosis.executor.options import load_options
from symbiosis.protocol import Call, Hello, Op, decode_reply, encode_call, encode_control
from symbiosis.protocol.endpoints import is_loopback
from symbiosis.transport import may_go_by_nccl
from symbiosis.transport.tcp import call_frames, tenant_queues
from symbiosis.transport.tcp.address import OPTIONS, Address
from symbiosis.transport.tcp.sockets import PIECE, cut
from symbiosis.transport.tensors import bytes_of
from tests.conftest import tiny_llama
from tests.processes import until
from tests.realm import ROWS, Raw, Realm, echoes


@pytest.fixture
def realm(tmp_path: Path) -> Iterator[Realm]:
    realm = Realm(tmp_path)
    yield realm
    realm.executor.close()


# ---------------------------------------------------------------- large messages


def test_large_payloads_come_and_go_in_small_frames(realm: Realm, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are received and joined bit by bit, and a neighbour's calls are answered meanwhile."""
    monkeypatch.setattr(tenant_queues, "FRAMES_AT_ONCE", 3)
    monkeypatch.setattr(call_frames, "JOINED_AT_ONCE", 1)
    raw, x = Raw.joined(realm.endpoint("alice")), torch.arange(5 * PIECE // 4 + 9, dtype=torch.int32)
    call = Call(Op.ECHO, 0, "int32", (len(x), 1))
    sent = cut(bytes_of(x), encrypted=True)
    assert len(sent) == 6
    raw.socket.send_multipart([encode_call(call, 1), *sent])
    realm.let_in("bob")
    bob = realm.session("bob")
    assert echoes(bob)
    head, *frames = raw.socket.recv_multipart()
    assert decode_reply(head).shape == (len(x), 1)
    assert [len(frame) for frame in frames] == [PIECE] * 5 + [36] and b"".join(frames) == bytes_of(x)
    whole = x.view(-1, 1).float()
    assert torch.equal(bob.call(Op.ECHO, 0, whole), whole)
    bob.close()
    raw.close()


def test_a_large_frame_ends_its_connection(realm: Realm) -> None:
    """One that is encrypted would keep those waiting whose connections have the same thread."""
    raw, call = Raw.joined(realm.endpoint("alice")), Call(Op.ECHO, 0, "uint8", (4 * PIECE, 1))
    raw.socket.send_multipart([encode_call(call, 1), bytes(call.nbytes)])
    until(lambda: raw.was_hung_up_on, "the end of the connection")
    raw.close()


@pytest.mark.parametrize("frames", [[PIECE, PIECE - 1, 1], [PIECE - 1, PIECE + 1], [PIECE], [PIECE, PIECE, 1], []])
def test_frames_that_are_not_those_of_the_payload_are_refused(realm: Realm, frames: list[int]) -> None:
    raw, call = Raw.joined(realm.endpoint("alice")), Call(Op.ECHO, 0, "uint8", (2 * PIECE, 1))
    raw.socket.send_multipart([encode_call(call, 1), *map(bytes, frames)])
    assert raw.codes(1) == [Code.BAD_FRAME]
    raw.close()


# ---------------------------------------------------------------- files


def test_keygen_makes_files_of_the_right_modes_and_overwrites_none(tmp_path: Path) -> None:
    made = CliRunner().invoke(main.app, ["keygen", "bob", "-o", str(tmp_path / "new")])
    assert made.exit_code == 0 and "bob.key" in made.output and "bob.pub" in made.output
    secret, public = tmp_path / "new/bob.key", tmp_path / "new/bob.pub"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert read_pair(secret).secret not in public.read_text() + made.output
    before = secret.read_bytes()
    again = CliRunner().invoke(main.app, ["keygen", "bob", "-o", str(tmp_path / "new")])
    assert again.exit_code == 2 and "exists" in again.output
    assert secret.read_bytes() == before


@pytest.mark.parametrize("name", ["", "../eve", ".hidden", "a/b", "x" * 65, "sp ace"])
def test_names_are_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a valid key name"):
        generate(name, tmp_path)
    assert not list(tmp_path.rglob("*.key"))


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret, public = generate("bob", tmp_path)
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_pair(secret)
    with pytest.raises(ConfigError, match="does not hold a pair of keys"):
        read_pair(public)
    public.write_text("rubbish\n")
    with pytest.raises(ConfigError, match="does not hold a public key"):
        read_public(public)
    with pytest.raises(ConfigError, match="cannot read"):
        read_public(tmp_path / "none.pub")


def test_the_list_of_tenants_follows_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tenants"
    folder.mkdir()
    tenants = Tenants(folder)
    assert tenants.look() and not tenants.look() and len(tenants) == 0
    _, public = generate("bob", tmp_path)
    (folder / "bob.pub").write_bytes(public.read_bytes())
    (folder / "bobby.pub").write_bytes(public.read_bytes())
    (folder / "broken.pub").write_text("?")
    (folder / "bob.key").write_text("not looked at")
    assert tenants.look() and not tenants.look()
    assert tenants.name_of(read_public(public)) == "bob"
    assert [problem.partition(" ")[0].rpartition("/")[2] for problem in tenants.problems] == ["bobby.pub", "broken.pub"]
    (folder / "bob.pub").unlink()
    (folder / "bobby.pub").unlink()
    assert tenants.look()
    assert tenants.name_of(read_public(public)) is None


def test_at_a_glance_who_comes_and_goes_is_seen_and_the_others_in_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: read_public(generate(name, tmp_path / "all")[1]) for name in "abcdefgh"}
    folder = tmp_path / "tenants"
    folder.mkdir()
    for name in "abcdefg":
        (folder / f"{name}.pub").write_bytes((tmp_path / f"all/{name}.pub").read_bytes())
    tenants, again, really = Tenants(folder), list[str](), Tenants._read
    tenants.look()
    time.sleep(2 * SETTLED_S)
    tenants.look()

    def read(self: Tenants, name: str, before: Any = None) -> Any:
        again.append(name)
        return really(self, name, before)

    monkeypatch.setattr(Tenants, "_read", read)
    assert not any(tenants.glance(2) for _ in range(4))
    assert len(again) == 8 and len(set(again)) == 7, "each in its turn"
    (folder / "a.pub").unlink()
    (folder / "h.pub").write_bytes((tmp_path / "all/h.pub").read_bytes())
    assert tenants.glance(0)
    assert (tenants.name_of(keys["a"]), tenants.name_of(keys["h"])) == (None, "h")
    (folder / "b.pub").write_bytes((tmp_path / "all/a.pub").read_bytes())  # in place
    changes = [tenants.glance(2) for _ in range(4)]
    assert changes.count(True) == 1
    assert (tenants.name_of(keys["a"]), tenants.name_of(keys["b"])) == ("b", None)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_at_a_glance_files_that_lie_elsewhere_are_all_looked_at(link: Callable, tmp_path: Path) -> None:
    """The kernel tells of nothing that happens to them there."""
    key = read_public(generate("alice", tmp_path / "all")[1])
    (tmp_path / "tenants").mkdir()
    link(tmp_path / "all" / "alice.pub", tmp_path / "tenants" / "alice.pub")
    tenants = Tenants(tmp_path / "tenants")
    tenants.look()
    time.sleep(2 * SETTLED_S)
    assert not tenants.look() and not tenants.glance(0)
    (tmp_path / "all" / "alice.pub").write_text("struck off")
    assert tenants.glance(0) and tenants.name_of(key) is None


def test_at_a_glance_a_folder_that_stays_the_same_is_listed_once_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing takes longest where tenants are many."""
    key = read_public(generate("alice", tmp_path / "all")[1])
    folder = tmp_path / "tenants"
    folder.mkdir()
    for number in range(20):
        (folder / f"a{number}.pub").write_text(f"public {number:040d}\n")
    tenants, listed, really = Tenants(folder), list[int](), Tenants._listed

    def listing(self: Tenants) -> list[str]:
        listed.append(1)
        return really(self)

    time.sleep(2 * SETTLED_S)
    tenants.look()
    monkeypatch.setattr(Tenants, "_listed", listing)
    assert not any(tenants.glance(2) for _ in range(40)) and 4 <= len(listed) <= 5
    (folder / "alice.pub").write_bytes((tmp_path / "all/alice.pub").read_bytes())
    assert tenants.glance(0) and tenants.name_of(key) == "alice"
    (folder / "alice.pub").write_text("struck off")  # at once: of late, it is looked at each time
    assert tenants.glance(0) and tenants.name_of(key) is None


def test_at_a_glance_who_has_expired_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = read_public(generate("alice", tmp_path, "2999-01-01")[1])
    tenants = Tenants(tmp_path)
    assert tenants.look() and tenants.name_of(key) == "alice" and not tenants.glance(0)
    monkeypatch.setattr(module, "time", lambda: moment("2999-01-02"))
    assert tenants.glance(0) and tenants.name_of(key) is None


def test_a_file_that_cannot_be_read_keeps_no_other_in_or_out(tmp_path: Path) -> None:
    folder = tmp_path / "tenants"
    folder.mkdir()
    keys = {}
    for name in ("alice", "bob"):
        _, public = generate(name, tmp_path)
        keys[name] = read_public(public)
    (folder / "alice.pub").write_bytes((tmp_path / "alice.pub").read_bytes())
    tenants = Tenants(folder)
    assert tenants.look() and tenants.name_of(keys["alice"]) == "alice"
    (folder / "carol.pub").symlink_to(tmp_path / "nowhere.pub")
    (folder / "dora.pub").mkdir()
    (folder / "alice.pub").unlink()
    (folder / "bob.pub").write_bytes((tmp_path / "bob.pub").read_bytes())
    assert tenants.look() and not tenants.look()
    assert (tenants.name_of(keys["alice"]), tenants.name_of(keys["bob"])) == (None, "bob")
    assert [re.findall(r"(\w+)\.pub: ", problem) for problem in tenants.problems] == [["carol"], ["dora"]]


def test_who_is_struck_off_is_so_while_no_descriptor_is_left(tmp_path: Path) -> None:
    """And who is not stays."""
    folder = tmp_path / "tenants"
    keys = []
    for name in ("alice", "bob"):
        keys.append(read_public(generate(name, folder)[1]))
    tenants = Tenants(folder)
    assert tenants.look()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(1)
        assert not tenants.look()
        (folder / "alice.pub").unlink()
        assert tenants.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [tenants.name_of(key) for key in keys] == [None, "bob"]


def test_without_its_folder_an_executor_lets_nobody_in(realm: Realm, caplog: pytest.LogCaptureFixture) -> None:
    alice = Session(realm.endpoint("alice"))
    assert echoes(alice)
    realm.tenants.rename(realm.folder / "elsewhere")

    def refused(session: Session) -> bool:
        try:
            return not echoes(session)
        except CallError as error:
            return error.code is Code.NOT_ALLOWED

    until(lambda: refused(alice), "the end of a session while the list is gone")
    assert refused(Session(realm.endpoint("alice")))
    assert f"folder of tenants {realm.tenants}" in caplog.text and "nobody may come in" in caplog.text
    (realm.folder / "elsewhere").rename(realm.tenants)
    until(lambda: echoes_again(realm), "service when the list is back")
    alice.close()


def echoes_again(realm: Realm) -> bool:
    session = Session(realm.endpoint("alice"))
    try:
        return echoes(session)
    except CallError:
        return False
    finally:
        session.close()


def test_a_key_that_cannot_be_read_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    realm = Realm(tmp_path)
    realm.executor.close()
    (realm.tenants / "broken.pub").write_text("?")
    with symbiosis.Executor(tiny_llama(), listen="tcp://127.0.0.1:0", key=str(realm.key), tenants=str(realm.tenants)):
        assert "broken.pub does not hold a public key" in caplog.text


# ---------------------------------------------------------------- addresses


def test_beyond_this_machine_an_executor_wants_keys() -> None:
    for address in ("0.0.0.0:0", "*:0", "192.0.2.1:7000"):
        with pytest.raises(ConfigError, match="--key and --tenants"):
            symbiosis.Executor(tiny_llama(), listen=f"tcp://{address}")
    with pytest.raises(ConfigError, match="go together"):
        load_options({"key": "executor.key"})


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("127.0.0.1:7000", True), ("127.8.9.1:0", True), ("localhost:1", True), ("[::1]:1", True), ("0.0.0.0:1", False),
        ("*:1", False), ("10.0.0.7:1", False), ("[::]:1", False), ("localhost.evil.org:1", False), (":1", False),
    ],
)  # fmt: skip
def test_which_addresses_only_this_machine_reaches(address: str, own: bool) -> None:
    assert is_loopback(address) == own


def test_with_keys_an_executor_listens_to_other_machines(realm: Realm) -> None:
    options = {"key": str(realm.folder / "executor.key"), "tenants": str(realm.tenants)}
    with symbiosis.Executor(tiny_llama(), listen="tcp://0.0.0.0:0", **options) as executor:
        port = executor.endpoint.rpartition(":")[2]
        session = Session(realm.endpoint("alice", address=f"tcp://127.0.0.1:{port}"))
        assert echoes(session)
        session.close()


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("key=a.key", "keys come in pairs"),
        ("server=a.pub", "keys come in pairs"),
        ("key=a&server=b&more=c", "more is no option of an endpoint"),
        ("keepalives=3", f"keepalives is no option of an endpoint, which are {', '.join(OPTIONS)}$"),
        ("nonsense", "nonsense is no option of an endpoint"),
        ("&", "write NAME=VALUE"),
        ("nccl=maybe", "nccl=yes or no"),
        *((f"{name}=", f"{name}= is no option of an endpoint: write NAME=VALUE") for name in OPTIONS),
        *((f"{name}=yes&{name}=no", f"{name} is given twice") for name in OPTIONS),
    ],
)
def test_a_wrong_option_is_found_in_each_of_several_endpoints(query: str, why: str, serve: Callable) -> None:
    with pytest.raises(ConfigError, match=why):
        Address.parse(f"127.0.0.1:7000?{query}")
    with pytest.raises(ConfigError, match=why):
        Session([serve(tiny_llama()).endpoint, f"tcp://127.0.0.1:7000?{query}"])


def test_a_plus_in_a_path_is_a_plus(tmp_path: Path) -> None:
    """As in the names of hosts beside it, which the same function reads."""
    folder = tmp_path / "c++ keys"
    folder.mkdir()
    secret, public = generate("alice", folder)
    for path in (folder, str(folder).replace(" ", "%20"), str(folder).replace("+", "%2B")):
        keys = Address.parse(f"127.0.0.1:7000?server={path}/{public.name}&key={path}/{secret.name}").keys()
        assert keys.own == read_pair(secret)


def test_a_secret_key_is_not_taken_for_a_public_one(realm: Realm) -> None:
    """It would work, and nobody would learn that the executor's secret went around."""
    secret = realm.folder / "executor.key"
    with pytest.raises(
        ConfigError, match=f"{secret} holds a secret key, which only its owner may have: give the .pub file"
    ):
        echoes(Session(f"tcp://127.0.0.1:7000?server={secret}&key={realm.folder}/alice.key"))
    shutil.copy(secret, realm.tenants / "mallory.pub")
    tenants = Tenants(realm.tenants)
    tenants.look()
    assert any("mallory.pub holds a secret key" in problem for problem in tenants.problems)


def test_keys_for_an_executor_without_keys_are_told_so(realm: Realm) -> None:
    with symbiosis.Executor(tiny_llama(), listen="tcp://127.0.0.1:0") as executor:
        with pytest.raises(CallError, match="has no keys, and this endpoint names some") as refused:
            echoes(Session(realm.endpoint("alice", address=executor.endpoint)))
        assert refused.value.code is Code.NOT_ALLOWED


def test_rows_go_in_clear_only_if_the_client_says_so(realm: Realm) -> None:
    """... where it has keys."""
    endpoint = realm.endpoint("alice", address="tcp://127.0.0.1:7000")
    assert [may_go_by_nccl(url) for url in (endpoint, f"{endpoint}&nccl=no", f"{endpoint}&nccl=yes")] == [
        False,
        False,
        True,
    ]
    assert may_go_by_nccl("tcp://127.0.0.1:7000") and not may_go_by_nccl("tcp://127.0.0.1:7000?nccl=no")
    assert not may_go_by_nccl("local:///tmp/executor.sock")
    assert not may_go_by_nccl("tcp://127.0.0.1:7000?server=none.pub&key=none.key"), "which reads no file"


# ---------------------------------------------------------------- who comes in


def test_a_tenant_computes_as_without_keys(realm: Realm) -> None:
    model, ids = tiny_llama(), torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad():
        expected = model(ids).logits
        symbiosis.wrap(model, realm.endpoint("alice"))
        assert torch.equal(model(ids).logits, expected)
    assert [session.peer.tenant for session in realm.executor.server.sessions.values()] == ["alice"]


def test_figures_of_all_are_not_told_to_tenants(realm: Realm) -> None:
    session = Session(realm.endpoint("alice"))
    with pytest.raises(CallError, match="only its operator may see them") as refused:
        session.call(Op.STATS, 0)
    assert refused.value.code is Code.NOT_ALLOWED
    assert echoes(session)
    session.close()


def strangers(realm: Realm) -> dict[str, str]:
    generate("eve", realm.folder)
    return {
        "no keys": realm.executor.endpoint,
        "an unknown key": realm.endpoint("eve"),
        "a tenant who takes another for the executor": realm.endpoint("alice", server="eve"),
    }


@pytest.mark.parametrize(
    ("who", "told"),
    [
        ("no keys", r"the endpoint must read \S+\?server=EXECUTOR.pub&key=MINE.key"),
        ("an unknown key", "its operator must have your .pub file among the tenants"),
        ("a tenant who takes another for the executor", "server= names another executor's .pub file"),
    ],
)
def test_strangers_stay_outside(who: str, told: str, realm: Realm) -> None:
    innocent = Session(realm.endpoint("alice"))
    assert echoes(innocent)
    begun = time.monotonic()
    with pytest.raises(SymbiosisError) as refused:
        Session(strangers(realm)[who]).call(Op.ECHO, 0, ROWS)
    assert time.monotonic() - begun < 40  # and not the 60 s of patience
    assert re.search(told, str(refused.value))
    assert "key=" not in str(refused.value).partition("--listen")[2]  # an executor has no such endpoint
    assert len(realm.executor.server.sessions) == 1
    assert echoes(innocent)
    innocent.close()


def test_tenants_come_and_go_without_a_restart(realm: Realm) -> None:
    alice = Session(realm.endpoint("alice"))
    generate("bob", realm.folder)
    with pytest.raises(SymbiosisError):
        Session(realm.endpoint("bob")).call(Op.ECHO, 0, ROWS)
    realm.let_in("bob")
    bob = Session(realm.endpoint("bob"))
    assert echoes(bob) and echoes(alice)
    (realm.tenants / "bob.pub").unlink()

    def struck_off() -> bool:
        try:
            return not echoes(bob)
        except CallError as error:
            assert error.code is Code.NOT_ALLOWED
            return True

    until(struck_off, "the end of a session whose key was taken off the list")
    assert echoes(alice)
    assert [session.peer.tenant for session in realm.executor.server.sessions.values()] == ["alice"]
    alice.close()
    bob.close()


def test_nobody_chooses_the_name_that_replies_go_to(serve: Callable) -> None:
    """Who did could take another's replies."""
    executor = serve(tiny_llama(), listen=["tcp://127.0.0.1:0"])
    for name, answered in ((None, True), (b"victim", False)):
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            if name:
                dealer.setsockopt(zmq.ROUTING_ID, name)
            dealer.connect(executor.endpoint)
            dealer.send(encode_control(Hello(client="raw")))
            assert bool(dealer.poll(10_000 if answered else 500)) == answered


# ---------------------------------------------------------------- what is seen on the way


class Wire:
    """A relay that keeps all it passes on."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("tcp://").split(":")
        self.seen = bytearray()
        self._target = (host, int(port))
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, far = self._door.accept()[0], socket.create_connection(self._target)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._door.close()


@pytest.mark.parametrize("keys", [True, False])
def test_only_without_keys_the_wire_shows_activations(keys: bool, realm: Realm, serve: Callable) -> None:
    plain = serve(tiny_llama(), listen=["tcp://127.0.0.1:0"])
    wire = Wire(realm.executor.endpoint if keys else plain.endpoint)
    session = Session(realm.endpoint("alice", address=wire.url) if keys else wire.url)
    secret = os.urandom(256)
    rows = torch.frombuffer(bytearray(secret), dtype=torch.uint8).view(1, 256)
    assert torch.equal(session.call(Op.ECHO, 0, rows), rows)
    session.close()
    assert (secret in wire.seen) != keys
    assert (b"model.layers.0" in wire.seen) != keys
    assert len(wire.seen) > 512
    wire.close()


# ---------------------------------------------------------------- keys that are exchanged, keys that expire


def exchanged(realm: Realm, key: str) -> None:
    """The executor is started again, with another key, at the same address."""
    address = realm.executor.endpoint
    realm.executor.close()
    realm.executor = symbiosis.Executor(
        tiny_llama(),
        listen=address,
        policy="immediate",
        key=str(realm.folder / f"{key}.key"),
        tenants=str(realm.tenants),
    )


@pytest.mark.parametrize("in_one_file", [True, False])
def test_an_executors_key_is_exchanged_under_a_running_job(in_one_file: bool, realm: Realm) -> None:
    _, new = generate("new", realm.folder)
    old = realm.folder / "executor.pub"
    if in_one_file:
        old.write_text(old.read_text() + "# the new one\n" + new.read_text())
        endpoint = realm.endpoint("alice")
    else:
        endpoint = realm.endpoint("alice").replace("executor.pub", f"executor.pub,{new}")
    session = Session(endpoint, patience=60.0)
    assert echoes(session)
    exchanged(realm, "new")
    assert echoes(session) and session.stats.reconnects == 1
    fresh = Session(endpoint)
    assert echoes(fresh)
    for one in (session, fresh):
        one.close()


def test_of_several_keys_none_is_taken_that_is_not_named(realm: Realm) -> None:
    for name in ("eve", "mallory"):
        generate(name, realm.folder)
    endpoint = realm.endpoint("alice").replace("executor.pub", f"eve.pub,{realm.folder}/mallory.pub")
    with pytest.raises(SymbiosisError, match="server= names another executor's .pub file"):
        Session(endpoint).call(Op.ECHO, 0, ROWS)


def test_a_tenant_may_have_two_keys_for_a_while(realm: Realm) -> None:
    generate("alice-new", realm.folder)
    with (realm.tenants / "alice.pub").open("a") as file:
        file.write((realm.folder / "alice-new.pub").read_text())
    for key in ("alice", "alice-new"):
        session = Session(realm.endpoint(key))
        assert echoes(session)
        assert {s.peer.tenant for s in realm.executor.server.sessions.values()} == {"alice"}
        session.close()


def test_keygen_writes_when_a_key_expires(tmp_path: Path) -> None:
    made = CliRunner().invoke(main.app, ["keygen", "bob", "-o", str(tmp_path), "--expires", "2999-01-31"])
    assert made.exit_code == 0
    assert "expires 2999-01-31\n" in (tmp_path / "bob.pub").read_text() and read_pair(tmp_path / "bob.key")
    for wrong, told in (("2020-01-01", "choose a date in the future"), ("soon", "is not a date: write 2027-01-31")):
        refused = CliRunner().invoke(main.app, ["keygen", "carol", "-o", str(tmp_path), "--expires", wrong])
        assert refused.exit_code == 2 and told in " ".join(refused.output.split())
    assert not (tmp_path / "carol.key").exists()


def test_an_executors_key_that_has_expired_is_not_taken(tmp_path: Path) -> None:
    secret, public = generate("executor", tmp_path)
    public.write_text(public.read_text() + "expires 2020-01-01\n")
    with pytest.raises(ConfigError, match="have expired: ask its operator"):
        Address.parse(f"127.0.0.1:7000?server={public}&key={secret}").keys()


def test_a_reply_as_large_as_there_is_room_for_comes_through(realm: Realm) -> None:
    """Encrypted it is somewhat longer."""
    session = realm.session()
    session._room = 1 << 20
    x = torch.rand(1 << 8, 1 << 10)
    assert x.nbytes == session._room and torch.equal(session.call(Op.ECHO, 0, x), x)
    assert not session.stats.retries
    session.close()


def test_what_is_no_text_is_no_key_file(tmp_path: Path) -> None:
    (tmp_path / "x.pub").write_bytes(b"\x9a" * 40)
    with pytest.raises(ConfigError, match=r"x.pub: it is not a key file$"):
        read_publics(tmp_path / "x.pub")
