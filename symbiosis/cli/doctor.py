"""`symbiosis doctor`: what this machine has and what it lacks, and whether an executor can be reached, in one line per check."""

import importlib.metadata
import os
import platform
import resource
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from symbiosis.base import requirements
from symbiosis.base.cgroups import usable_cores
from symbiosis.base.memory import free_memory, meminfo, whole_memory
from symbiosis.base.problems import Finding
from symbiosis.base.reporting import versions
from symbiosis.cli.cluster_findings import findings
from symbiosis.cli.model_fit import room_for
from symbiosis.errors import OutdatedPackage
from symbiosis.executor import mps
from symbiosis.protocol.endpoints import default_endpoints, how_to_start_one, named_endpoints, socket_path
from symbiosis.server.launch.footprint import EXECUTOR

if TYPE_CHECKING:
    from symbiosis.client.session import Session

ECHOES, ECHO_VALUES = 200, 1024
SLAB_BYTES = 4 << 20  # what a session on this host begins with
LITTLE_SHM = 64 << 20  # docker's default
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_ON_GPUS = 2, 11  # the newest that is known to be right there
FEW_CLIENTS = 16  # an executor should have file descriptors for more than these


def run(endpoint: str | None, model: str | None = None, cluster: Path | None = None) -> int:
    """Print every check as it is made; the exit status is 1 if something is broken."""
    broken = False
    for check in checks(endpoint, model, cluster):
        print(check, flush=True)
        broken |= check.state == "FAIL"
    return int(broken)


def checks(endpoint: str | None, model: str | None = None, cluster: Path | None = None) -> Iterator[Finding]:
    """Yield all checks. An executor that is not there is a failure only if the user named it. With a `model`, say where it fits; with the
    file of a `cluster`, look at that, and at no executor that was not named."""
    yield check_versions()
    yield check_threads()
    yield check_memory()
    yield check_gpus()
    yield check_mps()
    yield check_shared_memory()
    yield check_descriptors()
    if model is not None:
        yield room_for(model)
    if cluster is not None:
        yield from findings(cluster)
        if endpoint is None:
            return
    wanted = endpoint is not None or "SYMBIOSIS_ENDPOINT" in os.environ
    for url in (named_endpoints(endpoint) or (endpoint,)) if endpoint else default_endpoints():
        yield from check_executor(url, wanted)


def check_versions() -> Finding:
    found = versions()
    missing = [name for name, version in found.items() if version == "-"]
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing:
        return Finding("FAIL", "versions", text, f"Install what is missing: pip install {' '.join(missing)}")
    try:
        requirements.check()
    except OutdatedPackage as error:
        return Finding("FAIL", "versions", text, str(error))
    return Finding("ok", "versions", text)


def check_threads() -> Finding:
    """Check how many threads torch takes in each process: the executor and every client have such a pool."""
    import torch

    cores, usable, threads = len(os.sched_getaffinity(0)), usable_cores(), torch.get_num_threads()
    text = f"{cores} cores, {threads} torch threads in each process"
    if threads > usable:
        return Finding(
            "warn", "threads", f"{text}, and a cgroup that gives them the time of {usable:g} cores",
            f"Set OMP_NUM_THREADS={max(1, int(usable))} or less: threads beyond that wait for each other",
        )  # fmt: skip
    if threads > 1:
        return Finding(
            "warn", "threads", text,
            "Executor and clients on one host would compete: set OMP_NUM_THREADS so that their sum is the number of cores",
        )  # fmt: skip
    return Finding("ok", "threads", text)


def check_memory() -> Finding:
    """Check that an executor has room here, whatever its model is, and say what a cgroup leaves of the machine's memory."""
    free, whole, machine = free_memory(), whole_memory(), meminfo()["MemTotal"]
    text = f"{free / 2**30:.1f} of {whole / 2**30:.1f} GiB free"
    if whole < machine:
        text += f" in its cgroup (the machine has {machine / 2**30:.1f})"
    if free < EXECUTOR:
        remedy = "Raise the limit, or end what else runs there"
        return Finding("FAIL", "memory", f"{text}, and a process with torch takes {EXECUTOR >> 20} MiB", remedy)
    return Finding("ok", "memory", text)


def check_gpus() -> Finding:
    """List the GPUs by the driver's own tool, because asking CUDA would initialise it in this process."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return check_cpu_build()
    query = [nvidia_smi, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            "FAIL", "devices", f"the driver does not answer: {error}", "Reload or reinstall the NVIDIA driver"
        )
    gpus = listed.stdout.strip().splitlines()
    build = importlib.metadata.version("torch")
    if "+cpu" in build:
        return Finding("warn", "devices", "; ".join(gpus), f"torch {build} cannot use them: install torch's CUDA build")
    if tuple(map(int, build.split(".")[:2])) > TORCH_ON_GPUS:
        return Finding(
            "warn", "devices", "; ".join(gpus),
            f"torch {build} frees memory of CUDA graphs that are in use when others are dropped (PyTorch's issue 193402): take torch 2.11",
        )  # fmt: skip
    return Finding("ok", "devices", "; ".join(gpus))


def check_cpu_build() -> Finding:
    """Check, without a GPU, that torch has not brought gigabytes of CUDA packages along."""
    import torch

    text = f"cpu ({platform.machine()}); no NVIDIA driver"
    if torch.version.cuda is None:
        return Finding("ok", "devices", text)
    return Finding(
        "warn", "devices", f"{text}, but torch {torch.__version__} is a CUDA build, gigabytes larger than one for CPUs",
        f"Where there is a GPU, install its driver; else: pip install --extra-index-url {CPU_INDEX} torch=={torch.__version__.partition('+')[0]}+cpu",
    )  # fmt: skip


def check_mps() -> Finding:
    """Check for CUDA MPS, which lets clients and executor share a GPU at the same time. Without it their kernels take turns."""
    if shutil.which("nvidia-smi") is None:
        return Finding("ok", "CUDA MPS", "not needed without a GPU")
    first, *others = mps.places()
    found = mps.state(first)
    if found is mps.PipesState.SERVES:
        return Finding("ok", "CUDA MPS", f"running, pipes in {first}")
    if found is mps.PipesState.SILENT:
        return Finding(
            "FAIL", "CUDA MPS", f"the daemon with pipes in {first} does not answer",
            f"Programs that use CUDA may hang: end the process whose number is in {first / mps.CONTROL}.pid",
        )  # fmt: skip
    for pipes in others:
        if mps.state(pipes) is mps.PipesState.SERVES:
            return Finding(
                "warn", "CUDA MPS", "running, but not where CUDA looks", f"Start clients with {mps.PIPES}={pipes}"
            )
    if shutil.which(mps.CONTROL) is None:
        return Finding("warn", "CUDA MPS", "not installed", mps.INSTALL)
    return Finding(
        "warn", "CUDA MPS", f"none with pipes in {first}: processes on one GPU take turns",
        f"Start the executor with --mps, or a daemon with: {mps.CONTROL} -d; or set {mps.PIPES} as a running one has it",
    )  # fmt: skip


def check_shared_memory() -> Finding:
    """Check shared memory: local:// passes sealed memory segments, and data loaders use /dev/shm."""
    try:
        fd = os.memfd_create("symbiosis-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, SLAB_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        return Finding(
            "FAIL", "shared memory", f"memfd: {error}", "local:// needs it: raise the memory limit, or use tcp://"
        )
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding(
            "warn", "shared memory", "memfd works; no /dev/shm", "Mount it: torch's data loader workers use it"
        )
    free = shutil.disk_usage(shm).free
    text = f"memfd works; /dev/shm has {free / 2**30:.1f} GiB free"
    if free < LITTLE_SHM:
        return Finding(
            "warn", "shared memory", text, "Enlarge it (docker run --shm-size=1g): data loader workers use it"
        )
    return Finding("ok", "shared memory", text)


def check_descriptors() -> Finding:
    """Check the limit of descriptors. An executor holds four for each client on its host, and some tens of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = max(0, (soft - 64) // 4)
    text = f"{soft} (hard limit {hard}): enough for {clients} clients on this host"
    if clients < FEW_CLIENTS:
        return Finding("warn", "file descriptors", text, "Raise it before you start the executor: ulimit -n 1024")
    return Finding("ok", "file descriptors", text)


def check_executor(endpoint: str, wanted: bool) -> Iterator[Finding]:
    """Whether an executor is there, can be reached, and how soon it answers."""
    if problem := socket_problem(endpoint):
        yield Finding("FAIL" if wanted else "warn", "executor", problem, how_to_start_one(endpoint))
        return
    from symbiosis.client.session import Session
    from symbiosis.errors import SymbiosisError

    try:
        with closing(Session(endpoint, observer=True, patience=0.0)) as session:
            welcome = session.welcome
            served = sum(layer.kind != "client" for layer in welcome.manifest)
            text = f"{endpoint} serves {welcome.model_class}, {served} layers, model {welcome.fingerprint[:12]}"
            yield Finding("ok", "executor", text)
            yield Finding(
                "ok", "round trip", f"{echo_p50_us(session):.0f} us (p50 of {ECHOES} echoes of {ECHO_VALUES} values)"
            )
    except SymbiosisError as error:
        yield Finding("FAIL", "executor", str(error))  # our errors say themselves what to do


def socket_problem(endpoint: str) -> str:
    """Return what is wrong with the file of a local:// endpoint, or ""."""
    path = socket_path(endpoint)
    if path is None:
        return ""
    if not path.exists():
        return f"there is no {path}"
    if not stat.S_ISSOCK(path.stat().st_mode):
        return f"{path} is not a socket"
    if not os.access(path, os.W_OK):
        return f"{endpoint} belongs to another user: local:// is for processes of the executor's own user"
    return ""


def echo_p50_us(session: "Session") -> float:
    """Return the median time of a call that computes nothing, in microseconds."""
    import torch

    from symbiosis.protocol import Op

    payload, times = torch.zeros(1, ECHO_VALUES), []
    for _ in range(ECHOES):
        begun = perf_counter()
        session.call(Op.ECHO, 0, payload)
        times.append(perf_counter() - begun)
    return 1e6 * median(times)
