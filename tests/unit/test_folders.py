"""Folders are this user's alone before anything is read from them or put there, and one module names them all."""

import ast
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import symbiosis
from symbiosis.base.folders import CACHES, Use, check_caches, process_folder, temporary_folder, user_folder
from symbiosis.base.ownership import make_folder, resolved, why_not_ours
from symbiosis.base.problems import problems_of
from symbiosis.client.privacy.pad_register import registered
from symbiosis.errors import ConfigError
from symbiosis.executor import preflight as executor_preflight
from symbiosis.kernels import compile_c
from symbiosis.protocol import cluster_state
from symbiosis.serving.runner.compiled_layers import compile_layers
from tests.conftest import tiny_llama

STRANGER = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")
PACKAGE = Path(symbiosis.__file__).parent


@pytest.fixture
def shared_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /tmp, where this user's folders of every use are, and where others put theirs."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        for use in (Use.CACHE, Use.STATE):
            monkeypatch.setenv(use, str(place))
        for variable in (*CACHES, "TRITON_HOME"):
            monkeypatch.delenv(variable, raising=False)
        yield place


def given_away(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    os.chown(folder, STRANGER, STRANGER)


def open_to_all(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)


def open_to_a_group(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    os.chown(folder, -1, STRANGER)
    folder.chmod(0o770)


def sticky_and_anothers(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)
    os.chown(folder, STRANGER, STRANGER)


def linked_by_another(folder: Path) -> None:
    target = folder.with_name("target")
    target.mkdir(mode=0o700)
    folder.symlink_to(target)
    os.chown(folder, STRANGER, STRANGER, follow_symlinks=False)


PLANTED = {
    "another user's": given_away, "open to all": open_to_all, "open to a group": open_to_a_group,
    "sticky, and another user's": sticky_and_anothers, "another user's link": linked_by_another,
}  # fmt: skip


@as_root
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize("above", [False, True], ids=["itself", "what it lies in"])
def test_no_planted_folder_is_returned(
    use: Use, plant: Callable[[Path], None], above: bool, shared_place: Path
) -> None:
    folder = user_folder(use)
    plant(folder)
    for make in (False, True):
        with pytest.raises(ConfigError, match=rf"{folder}.* nothing in it can be trusted.*{use}"):
            user_folder(use, "inner", make=make) if above else user_folder(use, make=make)
    with pytest.raises(ConfigError), process_folder(use):
        pass


@as_root
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_folder_in_a_place_that_others_may_replace_is_not_used(
    plant: Callable[[Path], None], shared_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is like itself: they could put another one in its place."""
    plant(parent := shared_place / "parent")
    make_folder(safe := shared_place / "safe")
    (parent / "mine").mkdir(mode=0o700)
    monkeypatch.setenv(Use.STATE, str(parent / "mine"))
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "mine"))
    with pytest.raises(ConfigError, match=rf"(lies in|leads over the link) {parent}"):
        user_folder(Use.STATE)
    with pytest.raises(ConfigError), temporary_folder():
        pass
    (safe / "link").symlink_to(parent / "mine")  # a link of one's own is followed, and where it leads is looked at
    monkeypatch.setenv(Use.STATE, str(safe / "link"))
    with pytest.raises(ConfigError, match=str(parent)):
        user_folder(Use.STATE)
    for socket in (parent / "mine" / "x.sock", safe / "link" / "x.sock"):
        if parent.lstat().st_uid == STRANGER:
            with pytest.raises(ConfigError, match=rf"(lies in|leads over the link) {parent}"):
                resolved(socket)
        else:  # who answers there is asked of the kernel
            assert resolved(socket) == parent / "mine" / "x.sock"


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="again and again"):
        resolved(tmp_path / "a" / "folder")
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "c").symlink_to("real/../real/deep")
    assert resolved(tmp_path / "c" / "x") == tmp_path / "real" / "deep" / "x"


def test_all_folders_on_the_way_are_this_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(old)
    assert [each.stat().st_mode & 0o777 for each in (tmp_path / "a").rglob("*")] == [0o700, 0o700]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


# ---------------------------------------------------------------- what is compiled


@as_root
@pytest.mark.parametrize("variable", CACHES)
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_no_planted_cache_is_compiled_from(
    variable: str, plant: Callable[[Path], None], shared_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(shared_place / "cache")
    monkeypatch.setenv(variable, str(shared_place / "cache"))
    for begin in (check_caches, lambda: compile_layers(tiny_llama(), 2)):
        with pytest.raises(ConfigError, match=rf"nothing in it can be trusted.*\${variable}"):
            begin()
    options = executor_preflight.Options(model="demo", device="cuda")
    assert any(variable in line for line in problems_of(executor_preflight.CHECKS, options, Any))


def test_what_torch_would_take_from_the_common_place_is_not_taken(shared_place: Path) -> None:
    """torch unpickles and runs what lies in the folder that it makes there for a user of this name."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    common = Path(default_cache_dir())
    assert common.parent == shared_place
    check_caches(inductor=True)
    assert common.stat().st_mode & 0o777 == 0o700, "where some of it lies in any case"
    assert Path(cache_dir()) == shared_place / "symbiosis" / "inductor" == Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    for name in CACHES.values():
        assert (shared_place / "symbiosis" / name).stat().st_mode & 0o777 == 0o700
    check_caches()  # a child process inherits what is set by now


@as_root
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_planted_folder_of_torchs_is_not_compiled_with(plant: Callable[[Path], None], shared_place: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    plant(Path(default_cache_dir()))
    with pytest.raises(ConfigError, match="torchinductor_.* nothing in it can be trusted.*TMPDIR"):
        compile_layers(tiny_llama(), 2)
    check_caches()  # Triton has nothing there


def test_where_no_cache_can_be_kept_there_is_one_until_the_machine_ends(
    shared_place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (shared_place / "file").touch()
    monkeypatch.setenv(Use.CACHE, str(shared_place / "file"))
    check_caches()
    assert Path(os.environ["TRITON_CACHE_DIR"]) == shared_place / f"symbiosis-{os.getuid()}" / "cache" / "triton"
    assert str(shared_place / "file") in caplog.text


def test_a_home_of_triton_stays_triton_s(shared_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_HOME", str(shared_place / "home"))
    check_caches()
    assert "TRITON_CACHE_DIR" not in os.environ and (shared_place / "home/.triton/cache").is_dir()


@as_root
def test_a_library_that_another_user_has_planted_is_not_loaded(shared_place: Path, tmp_path: Path) -> None:
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    with compile_c.compiled(source) as library:
        kept = Path(library)
    assert kept.is_relative_to(shared_place)
    os.chown(kept.parent, STRANGER, STRANGER)
    with compile_c.compiled(source) as library:
        assert Path(library) != kept


@as_root
def test_a_register_of_pads_that_another_user_has_planted_is_not_believed(shared_place: Path) -> None:
    with registered("file", 1) as known:
        known[0] = 7
    given_away(shared_place / "symbiosis" / "pads")
    with pytest.raises(ConfigError, match=r"belongs to user.*\$XDG_STATE_HOME"), registered("file", 1):
        pass


# ---------------------------------------------------------------- who names them

NAMES = {"gettempdir", "mkdtemp", "mkstemp", "mktemp", "TemporaryDirectory", "NamedTemporaryFile"}


def named_by(file: Path) -> set[str]:
    """What of folders that are shared with others a file names, apart from its docstrings."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "attr", getattr(child, "id", getattr(child, "name", None)))
            text = child.value if isinstance(child, ast.Constant) else None
            found |= {str(name)} & NAMES
            if isinstance(text, str) and (text.startswith(("XDG_", "/tmp", "/var/tmp", "~/.")) or text == "TMPDIR"):
                found.add(text)
    return found


def test_one_module_names_the_folders_of_users() -> None:
    found = {str(file.relative_to(PACKAGE)): named_by(file) for file in PACKAGE.rglob("*.py")}
    assert found.pop("base/folders.py") >= {"gettempdir", "mkdtemp", "TemporaryDirectory", "XDG_RUNTIME_DIR"}
    assert found.pop("executor/mps.py") == {"/tmp/nvidia-mps"}, "where CUDA looks"
    assert {file: names for file, names in found.items() if names} == {}


# ---------------------------------------------------------------- clusters


def a_cluster(text: bytes, name: str = "demo") -> Path:
    """The folder of a cluster that runs and tells this."""
    make_folder(folder := cluster_state.folder_of(name))
    (folder / "told.json").write_bytes(text)
    return folder


def told(name: str = "demo") -> bytes:
    member = cluster_state.Member(name="m-1", kind="executor", model="llama", url="tcp://10.6.6.6:7000", state="ready")
    return cluster_state.msgspec.json.encode(cluster_state.Told(name=name, url="", members=(member,)))


@pytest.fixture
def all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_state, "is_running", lambda folder: (folder / "told.json").exists())


@as_root
@pytest.mark.parametrize("url", ["symbiosis://llama", "symbiosis://demo/llama"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_planted_cluster_is_not_believed(url: str, depth: int, shared_place: Path, all_run: None) -> None:
    """Whichever of its folders, or the file alone, another user has made."""
    file = a_cluster(told()) / "told.json"
    assert cluster_state.executors_at(url) == ("tcp://10.6.6.6:7000",)
    os.chown((file, *file.parents)[depth], STRANGER, STRANGER)
    with pytest.raises(ConfigError):
        cluster_state.executors_at(url)
    with pytest.raises(ConfigError):
        symbiosis.wrap(tiny_llama(), url)


GARBAGE = {
    "cut off": told()[:-9], "a bracket": b"[", "nothing": b"", "a number": b"7", "wrong types": b'{"name": 7, "url": []}',
    "an unknown state": told().replace(b"ready", b"banana"), "no text": b'{"name": "\xff\xfe", "url": ""}',
    "deep": b'{"name": "demo", "url": "", "x": ' + b"[" * 200_000, "huge": b" " * (cluster_state.LONGEST + 1) + told(),
    "of another cluster": told("other"),
}  # fmt: skip


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_told_as_such_and_hides_no_other_cluster(
    text: bytes, shared_place: Path, all_run: None, caplog: pytest.LogCaptureFixture
) -> None:
    file = a_cluster(text) / "told.json"
    a_cluster(told("good"), "good")
    with pytest.raises(ConfigError, match=f"{file} is not what the cluster 'demo' tells"):
        cluster_state.told_by("demo")
    assert [each.name for each in cluster_state.running()] == ["good"] and str(file) in caplog.text
    assert cluster_state.executors_at("symbiosis://llama") == ("tcp://10.6.6.6:7000",)


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")], ids=["a pipe", "a device"])
def test_what_is_no_file_is_not_waited_for(make: Callable[[Path], None], shared_place: Path, all_run: None) -> None:
    file = a_cluster(b"") / "told.json"
    file.unlink()
    make(file)
    with pytest.raises(ConfigError, match="is not what the cluster"):
        cluster_state.told_by("demo")


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "..", ".hidden", "a/b", "x" * 200, "a\0b"])
def test_a_cluster_is_a_name_and_no_path(name: str, shared_place: Path) -> None:
    with pytest.raises(ConfigError, match="is no name of a cluster"):
        cluster_state.told_by(name)
    with pytest.raises(ConfigError):
        cluster_state.executors_at(f"symbiosis://{name}/llama")


# ---------------------------------------------------------------- whose groups, and whose root


@as_root
def test_a_group_that_root_has_chosen_for_this_process_may_write_on_the_way(
    shared_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts a volume with `fsGroup`; nobody else's group may, nor everybody."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [STRANGER])
    (volume := shared_place / "volume").mkdir()
    (mine := volume / "mine").mkdir(mode=0o700)
    os.chown(mine, 1000, -1)
    for group, mode, is_ours in ((STRANGER, 0o2775, True), (4711, 0o2775, False), (STRANGER, 0o2777, False)):
        os.chown(volume, 0, group)
        volume.chmod(mode)
        assert (why_not_ours(mine) is None) == is_ours
        assert why_not_ours(mine, shared=True) is None


def test_nothing_is_compiled_while_others_could_change_what_compilers_leave_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (*CACHES, "PYTHONSAFEPATH"):
        monkeypatch.setenv(variable, str(tmp_path / "mine"))
    (shared := tmp_path / "shared").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    check_caches(inductor=True)
    assert os.environ["PYTHONSAFEPATH"] == "1"
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="set .TMPDIR to a folder of your own"):
        check_caches()
    shared.chmod(0o1777)
    check_caches()
