"""What cgroups leave a process is found in trees of both versions, however much of the hierarchy a container shows."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from symbiosis.base import cgroups, memory

G = 1 << 30
V2 = "29 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 25 0:30 {top} /sys/fs/cgroup/{name} rw shared:9 - cgroup cgroup rw,{name}\n"
HYBRID = "34 25 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """A root with 64 GiB of which 60 are free, a process in a cgroup, mounts, and files of groups by their paths."""

    def make(own: str, mounts: str, groups: dict[str, dict[str, object]]) -> Path:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text(
            f"MemTotal: {64 * G >> 10} kB\nMemAvailable: {60 * G >> 10} kB\nSwapFree: 0 kB\nHugePages_Total:       0\n"
        )
        (tmp_path / "proc/self/cgroup").write_text(own)
        (tmp_path / "proc/self/mountinfo").write_text(f"22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n{mounts}")
        for path, files in groups.items():
            folder = tmp_path / "sys/fs/cgroup" / path
            folder.mkdir(parents=True, exist_ok=True)
            for name, value in files.items():
                (folder / name).write_text(f"{value}\n")
        return tmp_path

    return make


def v2(most: object, used: int = 0, cached: int = 0, high: object = "max") -> dict[str, object]:
    stat = f"anon 1\ninactive_file {cached}"
    return {"memory.max": most, "memory.high": high, "memory.current": used, "memory.stat": stat}


def v1(most: int, used: int = 0, cached: int = 0) -> dict[str, object]:
    stat = f"cache 5\ninactive_file 1\ntotal_inactive_file {cached}"
    return {"memory.limit_in_bytes": most, "memory.usage_in_bytes": used, "memory.stat": stat}


NO_LIMIT_V1 = 9223372036854771712


@pytest.mark.parametrize(
    ("own", "mounts", "groups", "free", "whole"),
    [
        ("0::/\n", V2.format(top="/"), {}, 60 * G, 64 * G),
        ("0::/a\n", V2.format(top="/"), {"a": v2("max", 5 * G)}, 60 * G, 64 * G),
        ("0::/a\n", V2.format(top="/"), {"a": v2(8 * G, 5 * G, cached=G)}, 4 * G, 8 * G),
        ("0::/a/b\n", V2.format(top="/"), {"a": v2(8 * G, 6 * G), "a/b": v2("max", G)}, 2 * G, 8 * G),
        ("0::/a/b\n", V2.format(top="/"), {"a": v2(32 * G, G), "a/b": v2(4 * G, G)}, 3 * G, 4 * G),
        ("0::/a\n", V2.format(top="/"), {"a": v2(8 * G, G, high=2 * G)}, G, 2 * G),
        ("0::/a\n", V2.format(top="/"), {"a": v2(8 * G, 9 * G)}, 0, 8 * G),
        # a container: its own group is where the hierarchy is mounted, whatever it is called outside
        ("0::/\n", V2.format(top="/docker/1"), {"": v2(4 * G, G)}, 3 * G, 4 * G),
        ("0::/../other\n", V2.format(top="/"), {"": v2(4 * G, G)}, 3 * G, 4 * G),
        ("4:memory:/docker/1\n0::/\n", V1.format(top="/docker/1", name="memory"), {"memory": v1(4 * G, G)}, 3 * G, 4 * G),
        ("4:memory:/docker/1/x\n", V1.format(top="/docker/1", name="memory"), {"memory": v1(8 * G, G), "memory/x": v1(2 * G, G)}, G, 2 * G),
        # version 1, beside a version 2 that has no controllers
        ("4:memory:/a/b\n0::/\n", V1.format(top="/", name="memory") + HYBRID,
         {"memory/a": v1(6 * G, 5 * G, cached=2 * G), "memory/a/b": v1(NO_LIMIT_V1, G)}, 3 * G, 6 * G),
        ("4:memory:/a\n", V1.format(top="/", name="memory"), {"memory/a": v1(NO_LIMIT_V1, G)}, 60 * G, 64 * G),
        ("4:cpu:/a\n", V1.format(top="/", name="memory"), {"memory/a": v1(G)}, 60 * G, 64 * G),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_group_which_allows_least(
    machine: Callable, own: str, mounts: str, groups: dict, free: int, whole: int
) -> None:
    root = machine(own, mounts, groups)
    assert (memory.free_memory(root), memory.whole_memory(root)) == (free, whole)


@pytest.mark.parametrize(
    ("own", "mounts", "groups", "cores"),
    [
        ("0::/a\n", V2.format(top="/"), {"a": {"cpu.max": "max 100000"}}, None),
        ("0::/a/b\n", V2.format(top="/"), {"a": {"cpu.max": "50000 100000"}, "a/b": {"cpu.max": "max 100000"}}, 0.5),
        ("3:cpu,cpuacct:/a\n", V1.format(top="/", name="cpu"), {"cpu/a": {"cpu.cfs_quota_us": 25000, "cpu.cfs_period_us": 100000}}, 0.25),
        ("3:cpu:/a\n", V1.format(top="/", name="cpu"), {"cpu/a": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}}, None),
    ],
)  # fmt: skip
def test_cores_are_those_of_the_smallest_quota(
    machine: Callable, own: str, mounts: str, groups: dict, cores: float | None
) -> None:
    assert cgroups.usable_cores(machine(own, mounts, groups)) == (cores or len(os.sched_getaffinity(0)))


def test_where_nothing_tells_there_is_no_limit(tmp_path: Path) -> None:
    assert memory.free_memory(tmp_path) == cgroups.memory(tmp_path)[1] == sys.maxsize


def test_nobody_asks_for_memory_past_the_groups() -> None:
    sources = {file.name: file.read_text() for file in Path(memory.__file__).parent.rglob("*.py")}
    assert not [
        name for name, text in sources.items() if "PHYS_PAGES" in text or "memory.max" in text and name != "cgroups.py"
    ]
