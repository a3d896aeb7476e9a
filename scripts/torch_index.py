"""Prints what pip needs so that it takes torch's CPU build where there is no NVIDIA GPU; why, on stderr. Needs nothing but Python and pip.

A CPU build that pip finds by itself (in a folder of wheels, in a mirror) is taken from there, else from PyTorch's own index for CPUs.
Where that cannot be reached either, pip takes what PyPI has: on Linux, with gigabytes of CUDA packages.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints-cpu.txt"
TORCH = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
REACH_S, ASK_S = 5.0, 60.0
COSTLY = (
    f"no NVIDIA GPU, but {INDEX} cannot be reached: {TORCH} comes with 5 GB of CUDA packages. For a CPU build, set PIP_FIND_LINKS to a "
    "folder with its wheel, or TORCH_CPU_INDEX to a mirror of that index"
)


def options() -> tuple[list[str], str]:
    """pip's, for this machine; and why."""
    if shutil.which("nvidia-smi"):
        return [], "an NVIDIA GPU: torch as PyPI has it, with CUDA"
    if platform.system() != "Linux":
        return [], f"{platform.system()}: torch as PyPI has it"
    pinned = [f"--constraint={CONSTRAINTS}"]
    if found := cpu_build_by_itself():
        return pinned, f"no NVIDIA GPU: torch's CPU build, {found}"
    if reachable(INDEX):
        return [f"--extra-index-url={INDEX}", f"{TORCH}+cpu"], f"no NVIDIA GPU: {TORCH}+cpu from {INDEX}"
    return pinned, COSTLY


def cpu_build_by_itself() -> str:
    """The URL of the CPU build that pip would take as it is configured; empty if it would take another one."""
    pip = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        "--report=-",
        TORCH,
    ]
    try:
        report = subprocess.run(pip, capture_output=True, text=True, check=True, timeout=ASK_S).stdout
        (chosen,) = json.loads(report)["install"]
    except (subprocess.SubprocessError, ValueError, LookupError):
        return ""
    return str(chosen["download_info"]["url"]) if chosen["metadata"]["version"].endswith("+cpu") else ""


def reachable(index: str) -> bool:
    """Whether it has a page for torch."""
    try:
        urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=REACH_S).close()
    except (OSError, ValueError):
        return False
    return True


if __name__ == "__main__":
    given, why = options()
    print(why, file=sys.stderr)
    print(*given)
