"""Which torch a machine without a GPU gets: pip itself is asked, of small wheels on loopback."""

import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torch_index.py"
README = SCRIPT.parent.parent / "README.md"
pytestmark = pytest.mark.full
INDEX = "https://download.pytorch.org/whl/cpu"
NAME = "torch-{version}-py3-none-any.whl"


def put_wheel(folder: Path, version: str) -> None:
    """A wheel with nothing in it but its name and version."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / NAME.format(version=version), "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """Two indexes: `pypi`, which has the CUDA build, and `cpu`."""
    put_wheel(tmp_path / "web/pypi/torch", "2.13.0")
    put_wheel(tmp_path / "web/cpu/torch", "2.13.0+cpu")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def environment(tmp_path: Path, web: str, **more: str) -> dict[str, str]:
    """No driver, and nothing of this machine's own configuration of pip."""
    return {
        "PATH": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": f"{web}/pypi", "HOME": str(tmp_path),
        "TORCH_CPU_INDEX": f"{web}/cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more,
    }  # fmt: skip


def advised(env: dict[str, str]) -> tuple[list[str], str]:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True, timeout=100, env=env)
    return done.stdout.split(), done.stderr


def chosen(options: list[str], env: dict[str, str]) -> str:
    """The version that pip would install for somebody who wants `torch>=2.11`."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--ignore-installed", "--report=-"]
    done = subprocess.run([*pip, *options, "torch>=2.11"], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["install"][0]["metadata"]["version"])


def test_a_plain_machine_gets_the_cpu_build_of_pytorchs_index(tmp_path: Path, web: str) -> None:
    env = environment(tmp_path, web)
    assert chosen([], env) == "2.13.0", "the CUDA build, if nothing is done"
    options, why = advised(env)
    assert chosen(options, env) == "2.13.0+cpu"
    assert why == f"no NVIDIA GPU: torch==2.13.0+cpu from {web}/cpu\n"


def test_so_does_who_follows_the_readme_by_hand(tmp_path: Path, web: str) -> None:
    assert f"PIP_EXTRA_INDEX_URL={INDEX} pip install -c constraints-cpu.txt -e ." in README.read_text()
    constraint = [f"--constraint={README.with_name('constraints-cpu.txt')}"]
    assert chosen(constraint, environment(tmp_path, web, PIP_EXTRA_INDEX_URL=f"{web}/cpu")) == "2.13.0+cpu"


def test_a_cpu_build_that_pip_finds_by_itself_is_taken_without_another_index(tmp_path: Path, web: str) -> None:
    put_wheel(tmp_path / "wheels", "2.13.0+cpu")
    env = environment(tmp_path, web, PIP_FIND_LINKS=str(tmp_path / "wheels"), TORCH_CPU_INDEX=f"{web}/none")
    options, why = advised(env)
    assert chosen(options, env) == "2.13.0+cpu" and "index" not in " ".join(options).replace("torch_index", "")
    assert "CPU build, file://" in why


def test_what_cannot_be_had_is_said(tmp_path: Path, web: str) -> None:
    env = environment(tmp_path, web, TORCH_CPU_INDEX=f"{web}/none")
    options, why = advised(env)
    assert chosen(options, env) == "2.13.0"
    assert "5 GB of CUDA packages" in why and "PIP_FIND_LINKS" in why and "TORCH_CPU_INDEX" in why


def test_a_gpu_gets_the_cuda_build(tmp_path: Path, web: str) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert advised(environment(tmp_path, web)) == ([], "an NVIDIA GPU: torch as PyPI has it, with CUDA\n")
