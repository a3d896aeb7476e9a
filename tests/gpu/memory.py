"""What the programs of a test hold of a GPU, whatever others take meanwhile: a server of MPS, say, takes some of every GPU of a machine."""

import os
import shutil
import subprocess
from pathlib import Path

import torch

READINGS = 20  # at most, while the others' memory changes from one to the next


def left(device: int = 0) -> int:
    """Bytes of a GPU that neither this process nor those that it has started hold: what is free, and what others hold."""
    others = _held_by_others(device)
    for _ in range(READINGS):
        free, before = torch.cuda.mem_get_info(device)[0], others
        others = _held_by_others(device)
        if others == before:
            break
    return free + others


def held(device: int = 0) -> dict[int, int]:
    """Bytes of a GPU that each process holds, by its id. Nobody's are known where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", gpu, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    found = [line.replace(",", " ").split() for line in said.splitlines()]
    return {int(pid): int(mib) << 20 for pid, mib, *_ in found if pid.isdecimal() and mib.isdecimal()}


def _held_by_others(device: int) -> int:
    return sum(nbytes for pid, nbytes in held(device).items() if not _is_ours(pid))


def _is_ours(pid: int) -> bool:
    """Whether this process has started it, or one that it has started. One that is dead counts as ours."""
    while pid not in (0, os.getpid()):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return True
    return pid == os.getpid()
