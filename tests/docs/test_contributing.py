"""What CONTRIBUTING.md and docs/extending.md send their readers to is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = "\n\n".join((ROOT / page).read_text() for page in ("CONTRIBUTING.md", "docs/extending.md"))
PATHS = sorted(set(re.findall(r"(?<![\w/.])((?:symbiosis|tests|scripts|docs)/[\w./-]*|[A-Z]+\.md)", TEXT)))


def test_paths_exist() -> None:
    assert PATHS and not [path for path in PATHS if not (ROOT / path).exists()]


def test_files_of_a_folder_that_was_named_before_exist() -> None:
    for paragraph in TEXT.split("\n\n"):
        folders = [ROOT / folder for folder in re.findall(r"`([\w/]+/)`", paragraph)]
        for name in re.findall(r"`(\w+\.py)`", paragraph):
            assert any((folder / name).exists() for folder in folders), name


def test_every_tier_is_told_of() -> None:
    tiers = {folder.name for folder in (ROOT / "tests").iterdir() if (folder / "__init__.py").exists()}
    assert set(re.findall(r"^\| `tests/(\w+)/`", TEXT, re.MULTILINE)) == tiers


def test_make_targets_exist() -> None:
    named = {target for line in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", TEXT) for target in line.split()}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named & targets >= {"setup", "check", "test", "test-all", "test-fast", "test-gpu", "test-soak"}
    assert {target for target in named if "test" in target} <= targets


def test_names_are_where_it_says() -> None:
    """The tables, types and functions."""
    markers = set(re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert "alone" in markers
    words = set(re.findall(r"`([A-Za-z_]+)`", TEXT)) - markers - {"unit", "inproc"}
    code = "\n".join(path.read_text() for folder in ("symbiosis", "tests") for path in (ROOT / folder).rglob("*.py"))
    named = re.findall(r"\b(?:class|def) (\w+)|^(\w+)", code, re.MULTILINE)
    assert words and not words - {name for pair in named for name in pair}
