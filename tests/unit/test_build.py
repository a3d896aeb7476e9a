"""Which build this is: read from what git or setuptools has left, without git."""

from pathlib import Path

import pytest

import symbiosis
from symbiosis import build
from symbiosis.executor.observe.process_figures import process_figures
from symbiosis.protocol import VERSION

FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout, on a branch."""
    (tmp_path / "pyproject.toml").write_text('name = "symbiosis-llm"\n')
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs" / "heads" / "main").write_text(f"{FIRST}\n")
    return tmp_path


def test_a_branch_a_commit_and_packed_branches(folder: Path) -> None:
    git = folder / ".git"
    assert build.checked_out(folder) == FIRST
    (git / "HEAD").write_text(f"{SECOND}\n")
    assert build.checked_out(folder) == SECOND
    (git / "HEAD").write_text("ref: refs/heads/packed\n")
    assert build.checked_out(folder) == ""
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{FIRST} refs/heads/main\n{SECOND} refs/heads/packed\n")
    assert build.checked_out(folder) == SECOND


def test_another_working_tree(folder: Path) -> None:
    there, own = folder / "there", folder / ".git" / "worktrees" / "there"
    own.mkdir(parents=True)
    there.mkdir()
    (there / "pyproject.toml").write_text('name = "symbiosis-llm"\n')
    (there / ".git").write_text(f"gitdir: {own}\n")
    (own / "commondir").write_text("../..\n")
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    assert build.checked_out(there) == FIRST


@pytest.mark.parametrize("spoilt", ["", "ref: refs/heads/none", "ref: ../../secret", "x" * 40, "\xff"])
def test_what_cannot_be_read_is_no_commit(folder: Path, spoilt: str) -> None:
    (folder / ".git" / "HEAD").write_text(spoilt)
    assert build.checked_out(folder) == ""


def test_the_commit_of_a_repository_around_us_is_not_ours(folder: Path, tmp_path: Path) -> None:
    (folder / "pyproject.toml").write_text('name = "mine"\n')
    assert build.checked_out(folder) == ""
    assert build.checked_out(tmp_path / "nowhere") == ""


def test_what_was_packed_is_stamped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "STAMP", tmp_path / "symbiosis" / "commit.txt")
    build.STAMP.parent.mkdir()
    for text, told in ((f"{FIRST}\n", FIRST), ("$Format:%H$\n", ""), (None, "")):
        build.STAMP.write_text(text) if text else build.STAMP.unlink()
        assert build.commit.__wrapped__() == told


def test_a_metric_tells_of_it() -> None:
    (told,) = (family for family in process_figures() if family.name == "symbiosis_build_info")
    (sample,) = told.samples
    assert sample.value == 1 and set(sample.labels) == {"version", "commit", "protocol"}
    assert (sample.labels["version"], sample.labels["protocol"]) == (symbiosis.__version__, str(VERSION))
    assert build.build().startswith(symbiosis.__version__)
