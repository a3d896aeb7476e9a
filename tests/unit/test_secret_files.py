"""One rule for all files of secrets: nobody but their owner, who is this user or root, may read or write them."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from symbiosis.base import curve_keys
from symbiosis.base.curve_keys import Tenants, generate, read_pair
from symbiosis.base.key_lines import read_keys
from symbiosis.base.ownership import why_replaceable
from symbiosis.base.secret_files import create_secret, open_secret, read_secret, why_exposed
from symbiosis.client.privacy.pad_layout import Contents, laid_out
from symbiosis.client.privacy.pads import PadFile
from symbiosis.errors import ConfigError
from symbiosis.server.api_keys import Keys
from tests.secret_files import write_secret

STRANGER = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")


def a_key(folder: Path) -> Path:
    return generate("alice", folder)[0]


def api_keys(folder: Path) -> Path:
    return write_secret(folder / "keys", "anna key-of-anna\n")


def pads(folder: Path) -> Path:
    PadFile.create(folder / "my.pads", laid_out(Contents(bytes(32), 8, 4, ())))
    return folder / "my.pads"


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "a private key": (a_key, read_pair), "API keys": (api_keys, read_keys), "pads": (pads, PadFile),
}  # fmt: skip
each_kind = pytest.mark.parametrize(("make", "read"), KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@each_kind
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o664, 0o620, 0o602, 0o666, 0o440])
def test_a_secret_that_others_can_read_or_write_is_refused(
    make: Callable[[Path], Path], read: Callable[[Path], object], mode: int, tmp_path: Path
) -> None:
    path = make(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read(path)


@as_root
@each_kind
def test_a_secret_of_another_user_is_refused(
    make: Callable[[Path], Path], read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = make(tmp_path)
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match="belongs to user.*chown it"):
        read(path)
    os.chown(path, 0, 0)
    (link := tmp_path / "link").symlink_to(path)
    read(link)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(ConfigError, match="leads over the link"):
        read(link)


@each_kind
def test_a_pipe_is_not_waited_for(make: Callable[[Path], Path], read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="it is not a file"):
        read(tmp_path / "pipe")


@as_root
def test_a_secret_that_root_gave_to_this_process_by_a_group_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Kubernetes mounts it with `fsGroup`: links of root's to files of root's, which a group may read, and nobody else."""
    data = tmp_path / "..2026"
    data.mkdir()
    os.close(create_secret(data / "api-keys"))
    (data / "api-keys").write_text("anna key-of-anna\n")
    os.chown(data / "api-keys", 0, STRANGER)
    (tmp_path / "..data").symlink_to("..2026")
    (path := tmp_path / "api-keys").symlink_to("..data/api-keys")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    for mode in (0o400, 0o440, 0o640):
        (data / "api-keys").chmod(mode)
        assert list(read_keys(path)) == ["anna"]
    for mode in (0o644, 0o444, 0o460, 0o660):
        (data / "api-keys").chmod(mode)
        with pytest.raises(ConfigError, match="defaultMode: 0440"):
            read_keys(path)
    os.chown(data / "api-keys", 1000, STRANGER)
    (data / "api-keys").chmod(0o440)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(path)


def test_keys_that_are_opened_to_others_later_are_said_and_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    keys = Keys(api_keys(tmp_path), lambda: now[0])
    (tmp_path / "keys").chmod(0o644)
    now[0] = 10.0
    assert keys.tenant("Bearer key-of-anna").name == "anna"
    assert "chmod 600" in caplog.text


def test_nobody_is_let_in_while_others_can_read_the_executors_key(tmp_path: Path) -> None:
    secret, public = generate("executor", tmp_path)
    (tmp_path / "tenants").mkdir()
    tenants = Tenants(tmp_path / "tenants", secret)
    public.replace(tmp_path / "tenants" / "alice.pub")
    assert tenants.look() and tenants.members == {"alice"}
    for mode in (0o640, 0o602):
        secret.chmod(mode)
        tenants.look()
        assert not tenants.members and "chmod 600" in tenants.problems[0]
        secret.chmod(0o600)
        assert tenants.look() and tenants.members


def test_a_descriptor_of_a_refused_file_is_closed(tmp_path: Path) -> None:
    path = api_keys(tmp_path)
    path.chmod(0o644)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(ConfigError):
            open_secret(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="more than 4 bytes"):
        read_secret(path, 4)
    assert why_exposed(path, path.stat()) is None


def test_a_new_secret_is_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        for make in (a_key, pads):
            assert stat.S_IMODE(make(tmp_path).stat().st_mode) == 0o600
    finally:
        os.umask(old)


@each_kind
@pytest.mark.parametrize("how", ["everybody's", pytest.param("a stranger's", marks=as_root)])
def test_a_secret_whose_folder_others_can_replace_is_refused(
    make: Callable[[Path], Path], read: Callable[[Path], object], how: str, tmp_path: Path
) -> None:
    """They could put an old file back, which has all the right modes."""
    (folder := tmp_path / "up" / "folder").mkdir(parents=True)
    path = make(folder)
    read(path)
    others_take(tmp_path / "up", how)
    with pytest.raises(ConfigError, match=f"{path} lies in {tmp_path}/up, which"):
        read(path)


@pytest.mark.parametrize("how", ["everybody's", pytest.param("a stranger's", marks=as_root)])
def test_nobody_is_let_in_by_a_folder_that_others_can_replace(how: str, tmp_path: Path) -> None:
    (folder := tmp_path / "up" / "tenants").mkdir(parents=True)
    generate("alice", tmp_path)
    (tmp_path / "alice.pub").rename(folder / "alice.pub")
    tenants = Tenants(folder)
    assert tenants.look() and tenants.members == {"alice"}
    others_take(tmp_path / "up", how)
    assert tenants.look() and not tenants.members
    with pytest.raises(ConfigError, match=f"lies in {tmp_path}/up, which"):
        Tenants(folder)
    (tmp_path / "up").chmod(0o1777)
    os.chown(tmp_path / "up", os.getuid(), -1)
    assert tenants.look() and tenants.members == {"alice"}


def test_what_is_mounted_read_only_may_have_any_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a ConfigMap of Kubernetes has 0777."""
    (folder := tmp_path / "tenants").mkdir()
    folder.chmod(0o777)
    assert why_replaceable(folder / "alice.pub")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert why_replaceable(folder / "alice.pub") is None


def others_take(folder: Path, how: str) -> None:
    if how == "everybody's":
        folder.chmod(0o777)
    else:
        os.chown(folder, STRANGER, STRANGER)


def test_a_key_in_a_folder_that_was_open_counts_again_once_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file itself has not changed, and was read just while others could write to its folder."""
    monkeypatch.setattr(curve_keys, "SETTLED_S", -1.0)
    (folder := tmp_path / "tenants").mkdir()
    _, public = generate("alice", folder)
    tenants = Tenants(folder)
    doubts = tenants._doubts
    tenants.look_at([public.name])
    folder.chmod(0o707)
    monkeypatch.setattr(tenants, "_doubts", list)  # it is opened after that was asked
    tenants.look_at([public.name])
    tenants.look()
    assert not tenants.members
    folder.chmod(0o700)
    monkeypatch.setattr(tenants, "_doubts", doubts)
    tenants.look()
    assert tenants.members == {"alice"}
