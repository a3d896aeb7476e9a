"""Where tensors lie that several GPUs hold in parts, and how ranks get descriptors of each other's parts."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from symbiosis.errors import ConfigError, ProtocolError
from symbiosis.executor.ranks.descriptor_exchange import Exchange, close, part_of
from symbiosis.executor.ranks.rank import must_have_descriptors
from symbiosis.protocol import Layer
from symbiosis.transport.cuda import gpu_stripes
from symbiosis.transport.cuda.gpu_stripes import PAGE, RunLayout


def layer(name: str, *shape: int) -> Layer:
    return Layer(name, "linear", shape, "float32", "")


MODEL = [
    *(layer(f"{n}.{name}", 4096, 1024 + 512 * n) for n in range(5) for name in ("up", "down")),
    *(layer(f"norm{n}", 1024) for n in range(700)),
    layer("head", 4096, 1024),
]
TIED = {len(MODEL) - 1: 0}


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0)], ids=str)
def test_every_byte_lies_in_one_run(shares: tuple[float, ...]) -> None:
    layout = RunLayout(MODEL, shares, TIED)
    ends = [run.begin + run.nbytes for run in layout.runs]
    assert [run.begin for run in layout.runs] == [0, *ends[:-1]]
    assert all(run.nbytes and run.nbytes % PAGE == 0 for run in layout.runs)
    spans = sorted(
        (layout.begins[number], layout.begins[number] + 4 * one.shape[0] * (one.shape[1] if len(one.shape) > 1 else 1))
        for number, one in enumerate(MODEL)
        if number not in TIED
    )
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] <= ends[-1] and layout.begins[len(MODEL) - 1] == layout.begins[0]


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 1.0, 1.0, 1.0), (3.0, 1.0)], ids=str)
def test_ranks_hold_their_shares_of_each_large_tensor(shares: tuple[float, ...]) -> None:
    layout = RunLayout(MODEL, shares, TIED)
    for number in range(10):
        begin, nbytes = layout.begins[number], 4 * MODEL[number].shape[0] * MODEL[number].shape[1]
        for rank, share in enumerate(shares):
            held = sum(
                max(0, min(begin + nbytes, run.begin + run.nbytes) - max(begin, run.begin))
                for run in layout.of_rank(rank)
            )
            assert abs(held - nbytes * share / sum(shares)) <= PAGE
    # 700 small tensors lie together; and pages that one rank holds of two tensors are one run
    assert sum(run.nbytes for run in layout.runs) <= 4 * 4096 * sum(one.shape[1] for one in MODEL[:10]) + 12 * PAGE
    assert len(layout.runs) <= 11 * len(shares) - (9 if len(shares) == 2 else 0)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 2.0, 1.0), (3.0, 1.0)], ids=str)
def test_ranks_make_the_outputs_that_lie_in_their_memory(shares: tuple[float, ...]) -> None:
    """All but as many as are made together; and layers of which one rank holds nothing are left out."""
    wide = [layer(f"{n}.{name}", 4096 - 256 * n, 1280 + 512 * n) for n in range(5) for name in ("up", "down")]
    head = layer("head", 4096, 1024)  # which is not served
    layout = RunLayout([*wide, layer("small", 128, 256), layer("norm", 1024), head], shares, {})
    begins = layout.first_outputs([*layout.manifest[:-1], msgspec.structs.replace(head, kind="client")])
    assert begins.keys() == set(range(len(wide)))
    for number, at in begins.items():
        outputs, width = wide[number].shape
        ends = dict(pairwise([*sorted(at), outputs]))
        for rank, first in enumerate(at):
            assert first % 64 == 0
            begin = layout.begins[number] + 4 * width * first
            end = begin + 4 * width * (ends[first] - first)
            held = sum(max(0, min(end, run.begin + run.nbytes) - max(begin, run.begin)) for run in layout.of_rank(rank))
            assert end - begin - held <= 2 * 32 * 4 * width


def test_where_a_tensor_passes_from_rank_to_rank() -> None:
    layout = RunLayout(MODEL, (1.0, 1.0), TIED)
    edges = {run.begin for run in layout.runs}
    for number in range(10):
        (cut,) = layout.cuts(number)
        assert layout.begins[number] + cut in edges and cut % PAGE == 0
    assert layout.cuts(len(MODEL) - 1) == layout.cuts(0)
    assert all(layout.cuts(number) == [] for number in range(10, 200))


def test_a_rank_that_hands_over_too_little_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("must_have_such_pages", "enter"):
        monkeypatch.setattr(gpu_stripes, name, lambda device: None)
    monkeypatch.setattr(gpu_stripes, "created", lambda nbytes, device: 1)
    layout = RunLayout(MODEL, (1.0, 1.0), TIED)
    with pytest.raises(ProtocolError, match="rank 1 has handed over fewer pieces of memory than it holds"):
        gpu_stripes.mapped(layout, {0: [1] * len(layout.runs), 1: [1]}, None)  # type: ignore[arg-type]


def descriptors(count: int) -> list[int]:
    found = []
    for number in range(count):
        fd = os.memfd_create("part")
        os.write(fd, b"%d" % number)
        found.append(fd)
    return found


def open_files() -> Iterator[str]:
    """The names of the files that this process has open; other threads open and close theirs meanwhile."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            yield str(file.readlink())


@pytest.mark.parametrize("count", [0, 1, 253, 600])
def test_descriptors_go_from_rank_to_rank(count: int) -> None:
    """As often as it is asked for: to others, and to the rank itself when it is started again."""
    exchange, held = Exchange(), descriptors(count)
    assert part_of(1, exchange.address) is None
    exchange.hold(1, "digest", held)
    for _ in range(3):
        found = part_of(1, exchange.address)
        assert found is not None and found[0] == "digest"
        assert [os.pread(fd, 9, 0) for fd in found[1]] == [b"%d" % number for number in range(count)]
        assert part_of(0, exchange.address) is None  # the thread is done with what it sent
        close(found[1])
        assert len([name for name in open_files() if "memfd:part" in name]) == count
    close(held)


def test_an_exchange_outlives_whoever_says_nothing() -> None:
    exchange, held = Exchange(), descriptors(300)
    exchange.hold(0, "digest", held)
    for said in (b"", b"12345678", b"\0\0\0\0"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(bytes.fromhex(exchange.address))
            if said:
                sock.send(said)
    found = part_of(0, exchange.address)
    assert found is not None and len(found[1]) == 300
    close(found[1] + held)


def test_nobody_at_an_address_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        part_of(0, b"\0symbiosis-nobody".hex())


def test_descriptors_that_may_not_be_kept_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 4096))
    must_have_descriptors(3000)
    with pytest.raises(ConfigError, match="keeps 4000 descriptors open .* may have 4096 in all: allow more"):
        must_have_descriptors(4000)
