"""What the cgroups of this process leave it: memory and time of the CPUs, by versions 1 and 2, whichever group above it allows least."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

ROOT = Path("/")
MEMORY = (  # files with a limit, with what is in use, and what of that in memory.stat is given back when it is needed
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),  # beyond it, a group is kept waiting
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def folders(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folder of this process's group for a controller, and those of all groups above it that can be seen from here."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    own = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    for mount in mounts:
        place, _, kind = mount.partition(" - ")
        top, at = place.split()[3:5]
        name = {"cgroup2": "", "cgroup": controller}.get(kind.split()[0])
        if name in own and (not name or name in kind.split()[2].split(",")):
            yield from _upwards(root / at.lstrip("/"), own[name], top)


def _upwards(at: Path, own: str, top: str) -> Iterator[Path]:
    """Yield folders from a group's own up to where the hierarchy is mounted, which may show a part of it only, from the group `top` on."""
    path = PurePosixPath(own)
    inside = path.relative_to(top) if path.is_relative_to(top) and ".." not in path.parts else PurePosixPath()
    yield from (at / each for each in (inside, *inside.parents))


def memory(root: Path = ROOT) -> tuple[int, int]:
    """Return the least limit of this process's groups in bytes, and how many they leave it; where none has a limit, as many as there can be."""
    limit = free = sys.maxsize
    for folder in folders("memory", root):
        for most, used, cached in MEMORY:
            with suppress(OSError, ValueError, LookupError):  # there is no such file, or no limit
                limit = min(limit, own := int((folder / most).read_text()))
                told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = min(free, own - int((folder / used).read_text()) + int(told[cached]))
    return limit, max(0, free)


def usable_cores(root: Path = ROOT) -> float:
    """Return of how many cores this process may have the time: those that it may run on, within the quotas of its groups."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in folders("cpu", root):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())  # negative: none
            cores = min(cores, quota_us / int((folder / "cpu.cfs_period_us").read_text())) if quota_us > 0 else cores
    return cores
