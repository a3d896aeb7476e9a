"""The wheel, built and installed where nothing of the checkout can help: what is in it, what it says of itself, that it works."""

import email.message
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import symbiosis

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves folders behind."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT / "symbiosis", source / "symbiosis", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    code = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, built], cwd=source, check=True, capture_output=True, timeout=100)
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the wheel holds."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(installed: Path) -> email.message.Message:
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    return found.metadata  # type: ignore[return-value]


def test_the_wheel_holds_the_whole_package_and_nothing_else(installed: Path) -> None:
    own = {
        path.relative_to(ROOT) for path in (ROOT / "symbiosis").rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    packed = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert {path for path in packed if "dist-info" not in path.parts[0]} == own
    assert Path("symbiosis/py.typed") in own
    assert any(path.name == "LICENSE" for path in packed)


def test_what_the_distribution_says_of_itself(metadata: email.message.Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("symbiosis-llm", symbiosis.__version__)
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The Symbiosis developers" and metadata["Summary"]
    assert {"dev", "docs"} <= set(metadata.get_all("Provides-Extra") or ())
    pythons = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier") or () if "Python :: 3." in line]
    assert pythons == ["3.11", "3.12", "3.13"] and "Typing :: Typed" in (metadata.get_all("Classifier") or ())


def test_the_page_of_an_index_has_no_link_that_leads_nowhere(metadata: email.message.Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload())
    assert "# Symbiosis" in page and "docs/privacy.md" in page
    assert [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith(("https://", "#"))] == []


def test_it_runs_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    """By the entry points that pip would make; with the dependencies of this environment, and no checkout in sight."""
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    scripts = {point.name: point for point in found.entry_points if point.group == "console_scripts"}
    assert set(scripts) == {"symbiosis", "symbiosis-executor"}
    code = (
        f"import sys; sys.path[:0] = [{str(installed)!r}]; sys.argv = ['x', '--version']\n"
        "import symbiosis; assert symbiosis.__file__.startswith(sys.path[0])\n"
        "import importlib.metadata as m; assert m.version('symbiosis-llm') == symbiosis.__version__\n"
    )
    for point in scripts.values():
        run = f"{code}from {point.module} import {point.attr} as run; run()"
        done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, cwd=tmp_path, env=alone())
        assert (done.returncode, done.stdout) == (0, f"{symbiosis.__version__}\n"), done.stderr
    serve = f"{code}with symbiosis.Executor('demo') as e: print(symbiosis.report(symbiosis.from_executor(e.endpoint)))"
    done = subprocess.run([sys.executable, "-c", serve], capture_output=True, text=True, cwd=tmp_path, env=alone())
    assert "wrapped 35/36" in done.stdout, done.stderr


def alone() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def test_every_name_of_the_source_distribution_is_there() -> None:
    """MANIFEST.in, and what the README sends its readers to."""
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        command, _, names = line.partition(" ")
        if command in ("include", "graft"):
            assert all((ROOT / name).exists() for name in names.split()), line


def test_what_a_checkout_is_tested_with_is_what_is_required() -> None:
    """Nothing that the package imports comes by accident with something else."""
    required = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}  # type: ignore[index]
    code = "\n".join(path.read_text() for path in (ROOT / "symbiosis").rglob("*.py"))
    imported = {name.split(".")[0] for name in re.findall(r"^ *(?:import|from) (\w[\w.]*)", code, re.MULTILINE)}
    names = {
        "typing_extensions": "typing-extensions",
        "prometheus_client": "prometheus-client",
        "yaml": "pyyaml",
        "zmq": "pyzmq",
        "huggingface_hub": "huggingface-hub",
    }
    foreign = imported - set(sys.stdlib_module_names) - {"symbiosis", "triton", "datasets", "torchvision"}
    found = {name for name in foreign if importlib.util.find_spec(name)}
    assert {names.get(name, name) for name in found} <= required
