"""What others take of a GPU is no leak of a test's programs, and what these take is. No GPU is needed: a tool stands in for nvidia-smi."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import memory

MIB = 1 << 20
TOTAL = 1000 * MIB
Holds = Callable[..., None]


@pytest.fixture
def holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Holds:
    """Lets processes hold so many MiB of a GPU each."""
    said, tool = tmp_path / "said", tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\ncase "$1" in --id=GPU-u0) cat {said};; *) exit 6;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    held: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device}"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - MIB * sum(held.values()), TOTAL))

    def hold(pid: int, mib: int) -> None:
        held[pid] = mib
        said.write_text("".join(f"{pid}, {mib}\n" for pid, mib in held.items()))

    return hold


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    """A process that this one has started, in a session of its own."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_what_others_take_is_left_to_us(holds: Holds) -> None:
    holds(os.getpid(), 100)
    before = memory.left()
    holds(os.getppid(), 66)
    assert memory.left() == before == TOTAL - 100 * MIB
    assert memory.held() == {os.getpid(): 100 * MIB, os.getppid(): 66 * MIB}


def test_what_our_programs_take_is_not(holds: Holds, child: subprocess.Popen) -> None:
    """Nor what is taken in the name of one that is dead."""
    holds(child.pid, 64)
    assert memory.left() == TOTAL - 64 * MIB
    child.kill()
    child.wait()
    assert memory.left() == TOTAL - 64 * MIB


def test_without_the_tool_all_that_is_free_is_left(holds: Holds, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(os.getppid(), 66)
    monkeypatch.setenv("PATH", "")
    assert memory.held() == {} and memory.left() == TOTAL - 66 * MIB
