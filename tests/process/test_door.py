"""The door of `tcp://` with keys: who is on the list is known at once, and strangers cost the others little."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from symbiosis.base.allowance import MOST_KNOWN, Allowance
from symbiosis.base.curve_keys import Keyring, Tenants, generate, read_public
from symbiosis.base.folder_watch import FolderWatch
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code, ConfigError, SymbiosisError
from symbiosis.protocol import MAGIC_REPLY
from symbiosis.transport.tcp.address import Address
from tests.processes import until
from tests.realm import Raw, Realm, echoes


@pytest.fixture
def realm(tmp_path: Path) -> Iterator[Realm]:
    realm = Realm(tmp_path)
    yield realm
    realm.executor.close()


@pytest.fixture(params=[True, False], ids=["told", "looking"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel tells what changes in a folder: it need not."""
    if not request.param:
        monkeypatch.setattr(FolderWatch, "follow", lambda self, folder: None)
    return bool(request.param)


def is_let_in(realm: Realm, name: str) -> bool:
    session = Session(realm.endpoint(name), patience=5.0)
    try:
        return echoes(session)
    except SymbiosisError:
        return False
    finally:
        session.close()


def knocks(endpoint: str, count: int) -> list[zmq.Socket]:
    """So many connections that each begin a handshake."""
    place = Address.parse(endpoint.removeprefix("tcp://"))
    sockets = []
    for _ in range(count):
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger, socket.reconnect_ivl = 0, -1
        place.keys().unlock(socket)
        socket.connect(f"tcp://{place.where}")
        sockets.append(socket)
    return sockets


# ---------------------------------------------------------------- the list


def test_a_handshake_does_not_read_the_list(realm: Realm, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = [], Tenants._look_again
    monkeypatch.setattr(Tenants, "_look_again", lambda self, names: looks.append(1) or look(self, names))
    generate("eve", realm.folder)
    figures, begun = realm.executor.server.ledger, time.monotonic()
    sockets = knocks(realm.endpoint("eve"), 100)
    until(lambda: figures.kept_out["UNKNOWN_KEY"] >= 100, "a hundred handshakes")
    ticks = (time.monotonic() - begun) / 0.5
    assert len(looks) <= ticks + 2
    for socket in sockets:
        socket.close()


def test_who_is_struck_off_is_refused_at_the_very_next_message(realm: Realm) -> None:
    generate("bob", realm.folder)
    for _ in range(10):
        realm.let_in("bob")
        bob = Raw.joined(realm.endpoint("bob"))
        bob.send(1)
        assert bob.codes(1) == [Code.OK]
        (realm.tenants / "bob.pub").unlink()
        bob.send(2)
        assert bob.socket.recv_multipart()[0][:4] != MAGIC_REPLY
        bob.close()


def test_a_file_that_is_replaced_or_edited_counts_at_once(realm: Realm, told: bool) -> None:
    for name in ("bob", "carol"):
        generate(name, realm.folder)
    keys = {name: (realm.folder / f"{name}.pub").read_text() for name in ("bob", "carol")}
    file = realm.tenants / "friend.pub"
    file.write_text(keys["bob"])
    until(lambda: is_let_in(realm, "bob"), "a new tenant")
    assert not is_let_in(realm, "carol")
    file.write_text(keys["carol"])  # of the same length
    until(lambda: is_let_in(realm, "carol"), "a key that was edited in place")
    assert not is_let_in(realm, "bob")
    (realm.folder / "new").write_text(keys["bob"])
    (realm.folder / "new").rename(file)
    until(lambda: is_let_in(realm, "bob"), "a file that was renamed over another")
    assert not is_let_in(realm, "carol")


def test_a_file_written_twice_at_one_time_says_what_was_written_last(tmp_path: Path) -> None:
    """Clocks of files are coarse: nothing but the content tells the two apart."""
    for name in ("bob", "carol"):
        generate(name, tmp_path)
    keys = {name: (tmp_path / f"{name}.pub").read_text() for name in ("bob", "carol")}
    folder = tmp_path / "tenants"
    folder.mkdir()
    tenants = Tenants(folder)
    for _ in range(20):
        for name in ("bob", "carol"):
            (folder / "friend.pub").write_text(keys[name])
            tenants.look()
            assert tenants.name_of(read_public(tmp_path / f"{name}.pub")) == "friend"


def test_links_and_folders_that_come_back_are_followed(realm: Realm, told: bool) -> None:
    target = realm.folder / "elsewhere.pub"
    generate("bob", realm.folder)
    shutil.copy(realm.folder / "bob.pub", target)
    (realm.tenants / "bob.pub").symlink_to(target)
    until(lambda: is_let_in(realm, "bob"), "a tenant whose file is a link")
    target.unlink()
    until(lambda: not is_let_in(realm, "bob"), "the end of a link")
    realm.tenants.rename(realm.folder / "old")
    until(lambda: not is_let_in(realm, "alice"), "the end of the list")
    realm.tenants.mkdir()
    realm.let_in("bob")
    until(lambda: is_let_in(realm, "bob"), "a tenant of the new folder")
    assert not is_let_in(realm, "alice")
    shutil.copy(realm.folder / "old" / "alice.pub", realm.tenants)
    until(lambda: is_let_in(realm, "alice"), "another one")


# ---------------------------------------------------------------- what others could have written


def test_what_others_could_have_written_is_refused_at_the_start(tmp_path: Path) -> None:
    secret, _ = generate("executor", tmp_path)
    folder = tmp_path / "tenants"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="everybody can write .*tenants: chmod o-w"):
        Keyring.open(str(secret), str(folder))
    folder.chmod(0o775)
    assert Keyring.open(str(secret), str(folder)).tenants.look()
    secret.chmod(0o602)
    with pytest.raises(ConfigError, match="chmod 600"):
        Keyring.open(str(secret), str(folder))


def test_what_others_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, _ = generate("executor", tmp_path)
    _, public = generate("alice", tmp_path / "tenants")
    tenants = Keyring.open(str(secret), str(public.parent)).tenants
    assert tenants.look() and tenants.name_of(read_public(public)) == "alice"
    monkeypatch.setattr("os.getuid", lambda: 4242)
    monkeypatch.setattr("symbiosis.base.ownership.ROOT", -1)
    monkeypatch.setattr("symbiosis.base.ownership._root_from_within", lambda: None)  # which is kept
    with pytest.raises(
        ConfigError, match=r"executor.key lies in /, which belongs to user .*nothing there can be trusted"
    ):
        Keyring.open(str(secret), str(public.parent))
    assert tenants.look() and tenants.name_of(read_public(public)) is None


@pytest.mark.parametrize("what", ["tenants", "executor.key", "tenants/alice.pub"])
def test_what_others_could_write_later_lets_nobody_in_from_then_on(
    what: str, realm: Realm, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_let_in(realm, "alice")
    running = Session(realm.endpoint("alice"))
    assert echoes(running)
    path = realm.folder / what
    before = path.stat().st_mode
    path.chmod(before | 0o006)
    until(lambda: not is_let_in(realm, "alice"), "a refusal")
    with pytest.raises(CallError, match="does not serve the owner of this key"):
        echoes(running)
    until(lambda: "chmod" in caplog.text or "make new keys" in caplog.text, "a word in the log")
    path.chmod(before)
    until(lambda: is_let_in(realm, "alice"), "service")
    running.close()


# ---------------------------------------------------------------- when keys end


def test_a_key_ends_when_its_file_says_so(realm: Realm, caplog: pytest.LogCaptureFixture) -> None:
    bob = generate("bob", realm.folder)[1]
    text = bob.read_text()
    ends = time.gmtime(time.time() + 3)
    (realm.tenants / "bob.pub").write_text(f"{text}expires {time.strftime('%Y-%m-%dT%H:%M:%SZ', ends)}\n")
    session = Session(realm.endpoint("bob"))
    assert echoes(session)

    def refused() -> bool:
        try:
            return not echoes(session)
        except CallError as error:
            return error.code is Code.NOT_ALLOWED

    until(refused, "the end of a running session")
    assert not is_let_in(realm, "bob")
    assert "bob.pub has expired: bob may not come in by it" in caplog.text
    assert realm.executor.server.ledger.kept_out["EXPIRED_KEY"] >= 1
    assert is_let_in(realm, "alice")
    session.close()


@pytest.mark.parametrize(
    "line", ["expires 2027-13-01", "expires", "expires tomorrow", "Expires 2027-01-01", "expire 2027"]
)
def test_a_line_that_is_not_understood_lets_nobody_in(line: str, tmp_path: Path) -> None:
    """It may be meant to say when the key ends."""
    _, public = generate("alice", tmp_path)
    public.write_text(public.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="alice.pub"):
        read_public(public)


# ---------------------------------------------------------------- tenants who come very often


def test_a_tenant_who_comes_again_and_again_waits_at_the_door(realm: Realm) -> None:
    """... and nobody else does."""
    realm.let_in("bob")
    auth = realm.executor.server.listeners[0]._auth
    auth._comes = Allowance(5, 2.0)
    for _ in range(5):
        assert is_let_in(realm, "alice")
    sockets = knocks(realm.endpoint("alice"), 20)
    until(lambda: len(auth._held) >= 10, "a queue")
    assert is_let_in(realm, "bob") and auth._held
    for socket in sockets:
        socket.close()
    until(lambda: is_let_in(realm, "alice"), "the end of the queue")


def test_many_addresses_are_not_all_remembered() -> None:
    allowance = Allowance(2, 1.0)
    assert all(allowance.takes(number, 0.0) for number in range(MOST_KNOWN))
    assert not allowance.takes("one more", 0.0) and allowance.takes(7, 0.0) and not allowance.takes(7, 0.0)
    allowance.forget(1.5)
    assert allowance.takes("one more", 1.5) and not allowance.takes(7, 0.0)
