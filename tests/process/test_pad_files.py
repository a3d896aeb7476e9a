"""No pad is used twice, whatever becomes of its file: what cannot be told from right use is refused, or said not to be noticed."""

import copy
import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import symbiosis
from symbiosis.base.folders import Use, user_folder
from symbiosis.cli.pad_files import make
from symbiosis.client.privacy import pad_register
from symbiosis.client.privacy.pads import AT_ONCE, PadFile
from symbiosis.errors import ConfigError, WrapError
from tests.conftest import tiny_llama
from tests.private import recorded

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Files of pads, each with a key of its own, for one model."""
    tiny_llama().save_pretrained(tmp_path / "model")  # type: ignore[operator]

    def build(name: str = "x.pads", tokens: int = 300) -> Path:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make(str(tmp_path / "model"), tokens, tmp_path / name)
        return tmp_path / name

    return build


@pytest.fixture
def other_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, nothing is known of what was used before."""
    return lambda: monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))


def call(model: nn.Module, rows: int = 3) -> torch.Tensor:
    return model.model.layers[0].mlp.down_proj(torch.ones(rows, 96))  # type: ignore[no-any-return, union-attr, index]


def test_a_file_that_is_renewed_while_it_is_in_use_is_refused(serve: Callable, made: Made) -> None:
    """Not even the pads that were written off by then go with another file's effects."""
    executor = serve(tiny_llama(), integers=[8])
    log = recorded(executor)
    for exchange in (Path.replace, shutil.copyfile):
        file = made(f"{exchange.__name__}.pads")
        wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(file))
        call(wrapped)
        exchange(made(f"{exchange.__name__}.new"), file)  # type: ignore[operator]
        for rows in (3, AT_ONCE + 1):
            with pytest.raises(ConfigError, match="no longer the file that was opened.*Wrap the model again"):
                call(wrapped, rows)
    assert len([x for _, x in log if x is not None]) == 2


def test_a_relative_path_stays_that_of_the_folder_where_the_model_was_wrapped(
    serve: Callable, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = serve(tiny_llama(), integers=[8])
    file, namesake = made("here/x.pads"), made("there/x.pads")
    monkeypatch.chdir(file.parent)
    wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads("x.pads"))
    monkeypatch.chdir(namesake.parent)
    with torch.no_grad():
        assert torch.equal(call(wrapped), call(wrapped, AT_ONCE + 1)[:3])
    monkeypatch.chdir("/")
    call(wrapped, AT_ONCE + 1)
    assert PadFile(namesake).left(3) == 300 > PadFile(file).left(3)


def test_links_to_a_file_are_the_file(made: Made, tmp_path: Path) -> None:
    file = made()
    (tmp_path / "hard").hardlink_to(file)
    (tmp_path / "soft").symlink_to(file)
    ways = [PadFile(file), PadFile(tmp_path / "hard"), PadFile(tmp_path / "soft")]
    firsts = [way.take(0, 5) for way in (*ways, *reversed(ways))]
    rows = [row for first in firsts for row in range(first, first + 5)]
    assert len(set(rows)) == len(rows)


def test_a_copy_that_was_overtaken_is_refused(made: Made, tmp_path: Path) -> None:
    """Whichever of both is used first goes on; the other one's pads are no secret any more."""
    file = made()
    shutil.copy(file, tmp_path / "copy.pads")
    used, copied = PadFile(file), PadFile(tmp_path / "copy.pads")
    copied.take(0, 3)
    with pytest.raises(
        ConfigError, match=r"x.pads says that 0 of its pads are used where 64 were.*copy.*symbiosis pads"
    ):
        used.take(0, 3)
    with pytest.raises(ConfigError, match="it is a copy"):
        PadFile(file)
    assert copied.take(0, 3) == 3


def test_a_restored_backup_is_refused(made: Made, tmp_path: Path) -> None:
    file = made()
    backup = shutil.copyfile(file, tmp_path / "backup")
    running = PadFile(file)
    running.take(0, AT_ONCE)
    shutil.copyfile(backup, file)  # in its place, so that it looks the same
    for attempt in (lambda: running.take(0, 1), lambda: PadFile(file)):
        with pytest.raises(ConfigError, match="restored from a backup or snapshot"):
            attempt()


def test_what_was_used_elsewhere_is_said_once_and_goes_on(
    made: Made, other_machine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that was moved here looks like one that was copied: only its owner knows."""
    file = made()
    PadFile(file).take(0, 3)
    assert not caplog.records
    other_machine()
    with caplog.at_level(logging.WARNING, "symbiosis"):
        assert PadFile(file).take(0, 3) == AT_ONCE
        PadFile(file)
    (warning,) = caplog.messages
    assert "was used before, by another machine" in warning and "Remove all but one" in warning


def test_a_death_between_file_and_register_is_not_taken_for_a_copy(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PadFile(made())
    file.take(0, AT_ONCE)
    write = pad_register.Counters.__setitem__

    def die_at_the_register(counters: pad_register.Counters, index: int, number: int) -> None:
        if counters._start == 0:
            raise KeyboardInterrupt
        write(counters, index, number)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pad_register.Counters, "__setitem__", die_at_the_register)
        file.take(0, 1)
    assert file.take(0, 1) == 2 * AT_ONCE
    assert PadFile(file.path).take(0, 1) == 3 * AT_ONCE


def test_a_file_that_is_cut_off_in_use_is_an_error_and_not_the_end(serve: Callable, made: Made) -> None:
    file = made()
    program = (
        f"import os, torch; from pathlib import Path; from symbiosis.client.privacy.pads import PadFile; file = PadFile(Path({str(file)!r}))\n"
        "first = file.take(0, 3); os.truncate(file.path, 8192)\n"
        "try: file.effect(file.contents.streams[0].effects[-1], first, 3)\n"
        "except Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "was renewed, moved, cut off" in done.stdout, done


def test_a_file_that_is_gone_is_refused(made: Made) -> None:
    file = PadFile(made())
    file.take(0, 1)
    file.path.unlink()
    with pytest.raises(ConfigError, match="no longer the file"):
        file.take(0, 1)
    with pytest.raises(ConfigError, match="cannot be opened.*No such file"):
        PadFile(file.path)


def test_without_locks_nothing_is_used(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    file = PadFile(made())
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match="cannot be locked.*put it on a local disk"):
        file.take(0, 1)


def test_without_a_register_nothing_is_used(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = made()
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no folder"))
    with pytest.raises(ConfigError, match="XDG_STATE_HOME to a folder"):
        PadFile(file)


def test_a_full_disk_is_an_error_before_anything_is_used(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PadFile(made())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(ConfigError, match="cannot be written.*No space"):
            file.take(0, 1)
    assert file.take(0, 1) == AT_ONCE  # which was written, though perhaps not for long


def test_a_forked_child_looks_for_the_file_that_its_parent_opened(made: Made) -> None:
    file = PadFile(made())
    first = file.take(0, 1)
    read, write = os.pipe()
    for renewed in (False, True):
        if renewed:
            made("new.pads").replace(file.path)
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, file.take(0, 1).to_bytes(8, "little"))
            except ConfigError:
                os.write(write, b"refused!")
            os._exit(0)
        os.waitpid(pid, 0)
        told = os.read(read, 8)
        assert told == b"refused!" if renewed else int.from_bytes(told, "little") > first


def test_copies_of_a_model_share_the_pads(serve: Callable, made: Made) -> None:
    executor = serve(tiny_llama(), integers=[8])
    log = recorded(executor)
    wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(made()))
    with torch.no_grad():
        assert torch.equal(call(wrapped), call(copy.deepcopy(wrapped)))
    rows = [tuple(row.tolist()) for _, sent in log if sent is not None for row in sent]
    assert len(rows) == len(set(rows)) == 6


@pytest.mark.parametrize("file", [3, None, b"x.pads"])
def test_what_is_no_path_is_refused(file: object, serve: Callable) -> None:
    with pytest.raises(WrapError, match="write the path of a file"):
        symbiosis.wrap(tiny_llama(), serve(tiny_llama(), integers=[8]).endpoint, privacy=symbiosis.Pads(file))  # type: ignore[arg-type]


def test_a_relative_state_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The register would be another one wherever the program goes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for chosen in ("", "state", "./state"):
        monkeypatch.setenv("XDG_STATE_HOME", chosen)
        assert user_folder(Use.STATE, "pads") == tmp_path / ".local/state/symbiosis/pads"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert user_folder(Use.STATE, "pads") == tmp_path / "state/symbiosis/pads"


def test_a_register_on_a_full_disk_is_an_error_before_anything_is_used(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made()
    before = file.read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pad_register.os, "pwrite", full)
    with pytest.raises(ConfigError, match="cannot be written .No space left"):
        PadFile(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("length", [1 << 34, 1 << 62, (1 << 64) - 1])
def test_a_head_that_lies_about_its_length_is_refused(made: Made, length: int) -> None:
    file = made()
    with file.open("r+b") as opened:
        opened.seek(8)
        opened.write(length.to_bytes(8, "little"))
    with pytest.raises(ConfigError, match="is not a pad file .its head is cut off"):
        PadFile(file)
