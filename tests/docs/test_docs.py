"""The pages lead where they say, hold every public name, and become a site where mkdocs is installed (make docs)."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

import symbiosis
from symbiosis.base.key_lines import FORMAT, KEY_OPTIONS, LINE, KeyLine
from symbiosis.executor.scheduling.rules import POLICIES
from symbiosis.serving.serve_options import ServeOptions
from symbiosis.transport.tcp.address import OPTIONS

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "deploy").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCES.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCES.sub("", page.read_text())):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_table_of_an_endpoints_options_has_all_of_them() -> None:
    """... and no other, so that an option is told of where users look for it."""
    table = re.search(r"^\| option \| values \|.*?\n\n", (ROOT / "docs/usage.md").read_text(), re.MULTILINE | re.DOTALL)
    assert table and re.findall(r"^\| `(\w+)` \|", table[0], re.MULTILINE) == list(OPTIONS)


def test_every_page_is_on_the_site_and_every_public_name_in_the_reference() -> None:
    nav = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert {ROOT / "docs" / name for name in nav} >= {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    shown = set(re.findall(r"^::: symbiosis\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
    assert shown == set(symbiosis.__all__) - {"SymbiosisError"} | {"errors"}
    assert set(symbiosis.__all__) <= set(dir(symbiosis))


def test_what_the_site_is_made_with_can_be_installed() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["strict"] and all((ROOT / hook).is_file() for hook in config["hooks"])


def test_the_site_is_built(tmp_path: Path) -> None:
    for name in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "api.html").read_text()
    assert "SymbiosisError" in reference and all(
        f'id="symbiosis.{name}"' in reference for name in ("wrap", "from_executor", "Executor", "Split")
    )


@pytest.mark.parametrize("page", ["docs/usage.md", "docs/architecture.md"])
def test_every_policy_is_told_of(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [name for name in POLICIES if f"`{name}`" not in text] == []


def test_every_option_of_a_key_is_told_of() -> None:
    """In docs/serving.md, in the help of `--api-keys`, and in the error of a line that has another one."""
    text = (ROOT / "docs/serving.md").read_text().partition("\n## Keys\n")[2].partition("\n\n* ")[2]
    items = text.partition("\n\n")[0].split("\n* ")
    told = [re.findall(r"`(\w+)(?:=[^`]*)?`", item) for item in items]
    assert all(names[0] in KEY_OPTIONS for names in told)
    assert set(KEY_OPTIONS) <= {name for names in told for name in names}
    help = get_type_hints(ServeOptions, include_extras=True)["api_keys"].__metadata__[0].documentation
    assert FORMAT in help and FORMAT in LINE and all(name in FORMAT for name in KEY_OPTIONS)


def test_an_option_of_a_key_has_its_field() -> None:
    """And each field has an option, but for those that every line has."""
    assert {each.field for each in KEY_OPTIONS.values()} == {each.name for each in fields(KeyLine)} - {"name", "digest"}
