"""`symbiosis doctor`: finds what is broken, says how to mend it, and exits with 1 only then."""

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from torch import nn

from symbiosis.base import cgroups
from symbiosis.cli import doctor
from symbiosis.executor import mps
from tests.processes import run


def diagnose(*arguments: str, **environment: str) -> tuple[int, dict[str, str]]:
    """Exit status and the lines by the name of their check."""
    result = run("doctor", *arguments, **environment)
    assert "Traceback" not in result.stderr, result.stderr
    lines = dict(
        re.match(r"(?:ok|warn|FAIL) +(.*?)  ", line).group(1, 0)[:1] + (line,) for line in result.stdout.splitlines()
    )  # type: ignore[union-attr]
    return result.returncode, lines


def test_a_healthy_executor(llama: nn.Module, serve: Callable, tmp_path: Path) -> None:
    executor = serve(llama, listen=[f"local://{tmp_path}/executor.sock"])
    status, lines = diagnose(executor.endpoint, OMP_NUM_THREADS="1")
    assert status == 0
    assert "serves LlamaForCausalLM, 14 layers" in lines["executor"]
    assert float(re.search(r"([\d.]+) us", lines["round trip"]).group(1)) > 0  # type: ignore[union-attr]
    assert lines["threads"].startswith("ok")
    assert "torch 2" in lines["versions"]
    assert not executor.server.sessions or executor.server.ledger.dropped == 0


def test_no_executor_is_a_warning_unless_one_was_named(tmp_path: Path) -> None:
    status, lines = diagnose(XDG_RUNTIME_DIR=str(tmp_path))
    assert (status, lines["executor"][:4]) == (0, "warn")
    endpoint = f"local://{tmp_path}/none.sock"
    for status, lines in (diagnose(endpoint), diagnose(SYMBIOSIS_ENDPOINT=endpoint)):
        assert (status, lines["executor"][:4]) == (1, "FAIL")
        assert f"symbiosis-executor MODEL --listen {endpoint}" in lines["executor"]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "nonsense"])
def test_an_endpoint_that_does_not_work(endpoint: str) -> None:
    status, lines = diagnose(endpoint)
    assert (status, lines["executor"][:4]) == (1, "FAIL")


def test_a_socket_that_a_dead_executor_left(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(f"{tmp_path}/executor.sock")
    status, lines = diagnose(f"local://{tmp_path}/executor.sock")
    assert (status, lines["executor"][:4]) == (1, "FAIL")
    assert "Connection refused" in lines["executor"]


def test_a_file_that_is_no_socket(tmp_path: Path) -> None:
    (tmp_path / "executor.sock").write_text("")
    status, lines = diagnose(f"local://{tmp_path}/executor.sock")
    assert status == 1 and "is not a socket" in lines["executor"]


def test_few_file_descriptors() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        check = doctor.check_descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert check.state == "warn" and "9 clients" in check.text and "ulimit -n" in check.remedy
    assert doctor.check_descriptors().state == ("ok" if limits[0] >= 128 else "warn")


def test_too_little_memory_for_segments() -> None:
    """A process that may not map or write files of 4 MiB cannot use local://."""
    code = (
        "import resource, signal; from symbiosis.cli import doctor; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); print(doctor.check_shared_memory())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert result.stdout.startswith("FAIL  shared memory"), result.stdout + result.stderr
    assert doctor.check_shared_memory().state != "FAIL"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a command of the NVIDIA driver first on the PATH: a machine without a GPU has none."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def add(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return add


def test_gpus_are_those_that_the_driver_lists(driver: Callable) -> None:
    driver("nvidia-smi", 'echo "NVIDIA H200, 143771 MiB"')
    assert "NVIDIA H200, 143771 MiB" in doctor.check_gpus().text
    driver("nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    assert doctor.check_gpus().state == "FAIL"


@pytest.mark.parametrize(
    ("build", "state"), [("2.11.0", "ok"), ("2.11.1+cu130", "ok"), ("2.12.0", "warn"), ("3.0", "warn")]
)
def test_a_torch_that_frees_what_graphs_use(
    build: str, state: str, driver: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver("nvidia-smi", 'echo "NVIDIA H200, 143771 MiB"')
    monkeypatch.setattr("importlib.metadata.version", lambda name: build)
    check = doctor.check_gpus()
    assert check.state == state and ("take torch 2.11" in str(check)) == (state == "warn")


def test_a_cuda_build_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.version.cuda", None)
    assert doctor.check_gpus().state == "ok"
    monkeypatch.setattr("torch.version.cuda", "13.0")
    check = doctor.check_gpus()
    assert check.state == "warn" and "is a CUDA build" in check.text
    assert f"pip install --extra-index-url {doctor.CPU_INDEX} torch==2." in check.remedy and check.remedy.endswith(
        "+cpu"
    )


def test_mps(driver: Callable, fake_mps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver("nvidia-smi", "")
    check = doctor.check_mps()
    assert check.state == "warn" and f"none with pipes in {fake_mps}" in check.text and "--mps" in check.remedy
    with mps.running():
        monkeypatch.delenv(mps.PIPES)
        assert (doctor.check_mps().state, doctor.check_mps().text) == ("ok", f"running, pipes in {fake_mps}")
        monkeypatch.setenv("FAKE_MPS", "hang")
        monkeypatch.setattr(mps, "ANSWER_S", 0.3)
        assert doctor.check_mps().state == "FAIL" and "does not answer" in doctor.check_mps().text
        monkeypatch.delenv("FAKE_MPS")
        monkeypatch.setattr(mps, "ANSWER_S", 5.0)


def test_mps_where_cuda_does_not_look(driver: Callable, fake_mps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver("nvidia-smi", "")
    fake_mps.write_text("not a directory, so that our own is taken")
    with mps.running() as pipes:
        monkeypatch.delenv(mps.PIPES)
        assert doctor.check_mps().state == "warn" and f"{mps.PIPES}={pipes}" in doctor.check_mps().remedy


def test_mps_that_is_not_needed_or_not_installed(
    driver: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "pipes"))
    assert "not needed" in doctor.check_mps().text
    driver("nvidia-smi", "")
    assert doctor.check_mps().text == "not installed" and "nvidia-compute-utils" in doctor.check_mps().remedy


@pytest.mark.full
def test_bench_hands_its_arguments_on() -> None:
    bench = [sys.executable, "-c", "from symbiosis.cli.main import main; main()", "bench", "call", "--help"]
    result = subprocess.run(bench, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "bench_call.py" in result.stdout


def test_the_file_of_a_cluster_is_checked_before_it_is_started(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("port: 0\nmodels: {demo: {executors: 2, servers: [3, 5]}}")
    status, lines = diagnose("--cluster", str(file), XDG_RUNTIME_DIR=str(tmp_path))
    assert status == 0 and "lab.yaml: 2 executors and 3 servers of demo can be started" in lines["cluster"]
    assert "executor" not in lines, "nobody has named one"
    file.write_text("port: 0\nmodels: {demo: {model: /nowhere}}")
    status, lines = diagnose("--cluster", str(file), XDG_RUNTIME_DIR=str(tmp_path))
    assert (status, lines["cluster"][:4]) == (1, "FAIL") and "models.demo: " in lines["cluster"]
    status, lines = diagnose("--cluster", str(tmp_path / "none.yaml"), XDG_RUNTIME_DIR=str(tmp_path))
    assert status == 1 and "cannot read" in lines["cluster"]


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of this machine that allows 300 MiB."""
    above = next(cgroups.folders("memory"), Path("/nowhere"))
    made = above / f"symbiosis-test-{os.getpid()}"
    try:
        made.mkdir()
        limit = next(made / name for name, *_ in cgroups.MEMORY if (made / name).exists())
        limit.write_text(str(300 << 20))
    except (OSError, StopIteration) as error:
        with suppress(OSError):
            made.rmdir()
        pytest.skip(f"no cgroup can be made here: {error!r}")
    yield made
    made.rmdir()


def test_the_limit_of_a_true_group_is_found(group: Path) -> None:
    code = (
        f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from symbiosis.base import memory; print(memory.free_memory(), memory.whole_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    free, whole = map(int, done.stdout.split())
    assert whole == 300 << 20 and 200 << 20 < free < whole


def test_threads_beyond_the_quota_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 1.5)
    check = doctor.check_threads()
    assert check.state == "warn" and "the time of 1.5 cores" in check.text and "OMP_NUM_THREADS=1 " in check.remedy


def test_memory_is_what_a_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_memory().state == "ok"
    monkeypatch.setattr(doctor, "free_memory", lambda: 100 << 20)
    monkeypatch.setattr(doctor, "whole_memory", lambda: 1 << 30)
    check = doctor.check_memory()
    assert check.state == "FAIL" and "0.1 of 1.0 GiB free in its cgroup" in check.text
