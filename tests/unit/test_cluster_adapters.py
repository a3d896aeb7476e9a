"""Adapters in the folder of a cluster: what goes when one is removed or replaced, and what stays."""

from pathlib import Path

import pytest

from symbiosis.cluster.router import adapter_uploads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an adapter that somebody has put there (own), one that was sent (v1), and links to both."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").touch()
    send(tmp_path, "v1")
    (tmp_path / "latest").symlink_to("v1")
    (tmp_path / "best").symlink_to("own")
    return tmp_path


def send(folder: Path, name: str) -> Path:
    sent = adapter_uploads.new_folder(folder)
    (sent / "file").touch()
    (folder / "trial").symlink_to(sent.relative_to(folder))
    adapter_uploads._replace(folder, name, folder / "trial")
    return sent


def names(folder: Path) -> set[str]:
    """The adapters that can be read."""
    return {each.name for each in folder.iterdir() if (each / "file").exists()}


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("latest", {"own", "v1", "best"}),
        ("best", {"own", "v1", "latest"}),
        ("v1", {"own", "best"}),
        ("own", {"v1", "latest"}),
    ],
)
def test_what_is_removed_takes_no_other_with_it(folder: Path, name: str, left: set[str]) -> None:
    assert adapter_uploads.remove(folder, name) and names(folder) == left
    assert not (folder / name).is_symlink() and not adapter_uploads.remove(folder, name)
    assert len([each for each in (folder / adapter_uploads.SENT).iterdir() if any(each.iterdir())]) == (name != "v1")


@pytest.mark.parametrize("name", ["latest", "best", "v1", "own"])
def test_what_is_replaced_takes_no_other_with_it(folder: Path, name: str) -> None:
    sent = send(folder, name)
    assert names(folder) == {"own", "v1", "latest", "best"}
    assert (folder / name).resolve() == sent


def test_files_that_two_links_lead_to_stay_until_both_are_gone(folder: Path) -> None:
    (folder / "again").symlink_to((folder / "v1").readlink())
    assert adapter_uploads.remove(folder, "v1") and "again" in names(folder)
    assert adapter_uploads.remove(folder, "again") and not any((folder / adapter_uploads.SENT).iterdir())


def test_what_a_link_leads_to_elsewhere_stays(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    there = tmp_path_factory.mktemp("elsewhere")
    (folder / "abroad").symlink_to(there)
    assert adapter_uploads.remove(folder, "abroad") and there.is_dir() and not (folder / "abroad").is_symlink()
