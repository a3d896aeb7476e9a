"""What is too old is told when Symbiosis is imported, by name, with what is needed."""

import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

import symbiosis
import symbiosis.client
from symbiosis.base import requirements
from symbiosis.cli import doctor
from symbiosis.errors import ConfigError, OutdatedPackage
from symbiosis.executor import preflight
from symbiosis.executor.options import Options
from symbiosis.server.launch import preflight as serve_preflight
from symbiosis.serving.serve_options import ServeOptions

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_they_are_those_of_the_distribution() -> None:
    assert f"transformers>={requirements.needed()['transformers']}" in PROJECT["dependencies"]
    assert [f"{name}>={least}" for name, least in requirements.needed("serve").items()] == PROJECT[
        "optional-dependencies"
    ]["serve"]
    assert not requirements.needed("nothing")


def test_the_lowest_ones_are_those_that_are_tested() -> None:
    told = (Path(__file__).parents[2] / "constraints-lowest.txt").read_text()
    lowest = re.findall(r"^([\w-]+)==([\d.]+?)(?:\.0)?$", told, re.MULTILINE)
    assert len(lowest) == 3 and {f"{name}>={version}" for name, version in lowest} <= set(PROJECT["dependencies"])


def test_what_is_installed_here_is_new_enough() -> None:
    for extra in ("", "serve", "structured"):
        requirements.check(extra)


@pytest.fixture(params=["peft", "transformers", "torch", "pyzmq"])
def old(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of which a release far too old is installed."""
    name = request.param
    folder = tmp_path / f"{name}-0.9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_package_that_is_too_old_is_told_at_import(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = rf"^{old} 0\.9\.9 is too old.*pip install --upgrade '{old}>={re.escape(requirements.needed()[old])}'"
    for name in ("wrap", "Executor", "publish", "serving"):
        monkeypatch.delitem(vars(symbiosis), name, raising=False)
        with pytest.raises(ImportError, match=told):
            getattr(symbiosis, name)
    with pytest.raises(ImportError, match=told):
        importlib.reload(symbiosis.client)
    with pytest.raises(ConfigError, match=told):
        preflight.check(Options(model="demo"))
    assert (check := doctor.check_versions()).state == "FAIL" and re.search(told, check.remedy)
    assert issubclass(symbiosis.SymbiosisError, Exception)  # which a program needs to tell it


def test_what_is_imported_already_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook whose package was upgraded after it began."""
    import peft

    monkeypatch.setattr(peft, "__version__", "0.17.9.dev1")
    with pytest.raises(OutdatedPackage, match=r"peft 0\.17\.9\.dev1.*start Python anew"):
        requirements.check()


def test_extras_are_looked_at_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    import starlette

    monkeypatch.setattr(starlette, "__version__", "0.1")
    with pytest.raises(ConfigError, match=r"starlette 0\.1.*starlette>="):
        serve_preflight.check_packages(ServeOptions())
    requirements.check()


def test_what_is_not_installed_as_a_package_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert not requirements.outdated("structured")
