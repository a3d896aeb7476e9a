"""The wheel, built and installed where nothing of the checkout can help: what is in it, what it says of itself, that it works."""

import email.message
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import symbiosis

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef" * 2 + "01234567"  # of which the wheel is made
BUILD = f"{symbiosis.__version__}+g{COMMIT[:12]}"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def built(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From a copy: setuptools leaves folders behind."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT / "symbiosis", source / "symbiosis", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text(COMMIT)
    code = f"from setuptools import build_meta; import sys; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, built], cwd=source, check=True, capture_output=True, timeout=100)
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory)


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


@pytest.mark.full
def test_the_wheel_holds_the_whole_package_and_nothing_else(installed: Path) -> None:
    own = {
        path.relative_to(ROOT) for path in (ROOT / "symbiosis").rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    packed = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert {path for path in packed if "dist-info" not in path.parts[0]} == own | {Path("symbiosis_run.pth")}
    assert Path("symbiosis/py.typed") in own
    assert any(path.name == "LICENSE" for path in packed)


@pytest.mark.full
def test_what_the_distribution_says_of_itself(metadata: email.message.Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("symbiosis-llm", symbiosis.__version__)
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The Symbiosis developers" and metadata["Summary"]
    assert {"dev", "docs"} <= set(metadata.get_all("Provides-Extra") or ())
    pythons = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier") or () if "Python :: 3." in line]
    assert pythons == ["3.11", "3.12", "3.13"] and "Typing :: Typed" in (metadata.get_all("Classifier") or ())


@pytest.mark.full
def test_the_page_of_an_index_has_no_link_that_leads_nowhere(metadata: email.message.Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload())
    assert "# Symbiosis" in page and "docs/privacy.md" in page
    assert [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith(("https://", "#"))] == []


def without_checkout() -> dict[str, str]:
    """Environment variables by which no program finds the checkout that these tests are of."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def environment_with(wheel: Path, folder: Path) -> Path:
    """Make a virtual environment with nothing but a wheel."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=100)
    install = [sys.executable, "-m", "pip", "--python", folder, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True, env=without_checkout(), timeout=100)
    return folder


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel. The dependencies are those of this environment, without what is installed there
    by links, as a checkout is."""
    folder = environment_with(wheel, tmp_path_factory.mktemp("environment"))
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def said(environment: Path, folder: Path, program: str, *arguments: str) -> str:
    """What a program of the environment prints, run where no checkout is in sight."""
    command = [environment / "bin" / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=without_checkout(), timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_its_commands_run_where_it_is_installed(environment: Path, tmp_path: Path) -> None:
    for command in ("symbiosis", "symbiosis-executor"):
        assert said(environment, tmp_path, command, "--version") == f"{BUILD}\n"
    where = said(environment, tmp_path, "python", "-c", "import symbiosis; print(symbiosis.__file__)")
    assert Path(where).is_relative_to(environment)


@pytest.mark.full
def test_it_serves_where_it_is_installed(environment: Path, tmp_path: Path) -> None:
    """The demo model, and the C that is compiled on the spot."""
    code = (
        "import importlib.metadata, symbiosis; from symbiosis.kernels import few_rows\n"
        "assert importlib.metadata.version('symbiosis-llm') == symbiosis.__version__\n"
        "with symbiosis.Executor('demo') as e: print(symbiosis.report(symbiosis.from_executor(e.endpoint)))\n"
        "print('compiled:', few_rows.compiled_kernel() is not None)"
    )
    text = said(environment, tmp_path, "python", "-W", "ignore", "-c", code)
    assert "wrapped 35/36" in text
    assert f"compiled: {shutil.which('cc') is not None}" in text


def hooks(environment: Path, folder: Path, switch: str) -> bool:
    """Whether a program of this environment shares, though nothing is on its PYTHONPATH, and it is told not to read that."""
    command = [environment / "bin" / "python", "-I", "-c", "import sys; print('symbiosis.run.hook' in sys.modules)"]
    variables = {**without_checkout(), "SYMBIOSIS_RUN": switch}
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=True, timeout=100)
    assert not done.stderr
    return done.stdout == "True\n"


@pytest.mark.full
def test_an_environment_variable_has_its_programs_share(environment: Path, tmp_path: Path) -> None:
    assert [hooks(environment, tmp_path, switch) for switch in ("1", "0", "")] == [True, False, False]


@pytest.mark.full
def test_so_it_does_where_a_checkout_is_installed(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    environment = environment_with(built("editable", tmp_path_factory), tmp_path / "environment")
    assert hooks(environment, tmp_path, "1") and not hooks(environment, tmp_path, "0")


def test_every_name_of_the_source_distribution_is_there() -> None:
    """MANIFEST.in, and what the README sends its readers to."""
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        command, _, names = line.partition(" ")
        if command in ("include", "graft"):
            assert all((ROOT / name).exists() for name in names.split()), line


def test_what_a_checkout_is_tested_with_is_what_is_required() -> None:
    """Nothing that the package imports comes by accident with something else."""
    extras = PROJECT["optional-dependencies"]
    needed = PROJECT["dependencies"] + extras["serve"] + extras["structured"] + extras["otel"] + extras["tinker"]
    required = {re.match(r"[\w-]+", line)[0] for line in needed}  # type: ignore[index]
    code = "\n".join(path.read_text() for path in (ROOT / "symbiosis").rglob("*.py"))
    imported = {name.split(".")[0] for name in re.findall(r"^ *(?:import|from) (\w[\w.]*)", code, re.MULTILINE)}
    names = {
        "typing_extensions": "typing-extensions",
        "prometheus_client": "prometheus-client",
        "opentelemetry": "opentelemetry-sdk",
        "yaml": "pyyaml",
        "zmq": "pyzmq",
        "huggingface_hub": "huggingface-hub",
        "google": "tinker",  # protobuf, which reads the descriptor that it brings
    }
    foreign = imported - set(sys.stdlib_module_names) - {"symbiosis", "triton", "datasets", "torchvision", "trl"}
    found = {name for name in foreign if importlib.util.find_spec(name)}
    assert {names.get(name, name) for name in found} <= required


@pytest.mark.full
def test_a_source_distribution_tells_of_its_commit_and_leaves_the_checkout_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "symbiosis").mkdir()
    for name in ("__init__.py", "build.py", "commit.txt"):
        shutil.copy(ROOT / "symbiosis" / name, tmp_path / "symbiosis")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(COMMIT)
    code = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", code, tmp_path / "dist"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=100)
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as packed:
        (name,) = (each for each in packed.getnames() if each.endswith("symbiosis/commit.txt"))
        assert packed.extractfile(name).read().decode().strip() == COMMIT  # type: ignore[union-attr]
    assert (tmp_path / "symbiosis" / "commit.txt").read_text() == "$Format:%H$\n"
