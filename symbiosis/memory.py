"""How much memory this machine has to give, and when Python looks for what is not used any more."""

import gc
import sys
from contextlib import suppress
from pathlib import Path

USUAL = gc.get_threshold()
WHILE_LOADING = 100_000  # new objects until the next look: to load torch and transformers makes a million, and hardly any of them goes


def free_memory() -> int:
    """Return how many bytes a new process could have: the machine's, with swap, within the limit of its cgroup. Where nothing tells,
    there is no limit."""
    if not Path("/proc/meminfo").exists():
        return sys.maxsize
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = sum(int(told[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    with suppress(OSError, ValueError, LookupError):  # no cgroup, or no limit
        group = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip())
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, int((group / "memory.max").read_text()) - used + int(cached["inactive_file"]))
    return max(0, free)


def look_seldom() -> None:
    """Look seldom from now on. A server is loaded an eighth sooner."""
    gc.set_threshold(WHILE_LOADING, *USUAL[1:])


def look_at_what_is_new() -> None:
    """Look as usual from now on, but not at what is there: to search a model takes a tenth of a second, which would hold up everybody's
    calls and tokens."""
    gc.set_threshold(*USUAL)
    gc.collect()
    gc.freeze()
