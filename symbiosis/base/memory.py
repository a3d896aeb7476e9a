"""How much memory this machine has to give, and when Python looks for what is not used any more."""

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

from symbiosis.base import cgroups
from symbiosis.base.cgroups import ROOT

USUAL = gc.get_threshold()
WHILE_LOADING = 100_000  # new objects until the next look: to load torch and transformers makes a million, and hardly any of them goes


def free_memory(root: Path = ROOT) -> int:
    """Return how many bytes a new process could have: the machine's, with swap, within the limits of its cgroups. Where nothing tells,
    there is no limit."""
    if not (root / "proc/meminfo").exists():
        return sys.maxsize
    told = meminfo(root)
    return min(told["MemAvailable"] + told["SwapFree"], cgroups.memory(root)[1])


def whole_memory(root: Path = ROOT) -> int:
    """Return how many bytes all that runs here could have together."""
    return min(meminfo(root)["MemTotal"], cgroups.memory(root)[0])


def rss_bytes() -> int:
    """Resident memory of this process."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """Return what the kernel tells of the machine's memory, in bytes."""
    lines = (line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return {name: int(told.split()[0]) << 10 for name, told in lines}


def look_seldom() -> None:
    """Look seldom from now on. A server is loaded an eighth sooner."""
    gc.set_threshold(WHILE_LOADING, *USUAL[1:])


def look_at_what_is_new() -> None:
    """Look as usual from now on, but not at what is there: to search a model takes a tenth of a second, which would hold up everybody's
    calls and tokens."""
    gc.set_threshold(*USUAL)
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Return freed memory to the system. The C library keeps what lies between blocks that are in use, which may be as much again."""
    with suppress(OSError, AttributeError):  # only the GNU C library has it
        ctypes.CDLL(None).malloc_trim(0)
