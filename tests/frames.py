"""Calls of every op for tests: right ones, ones that are cut or that need much memory, and ones that say what their op does not use, or
what nobody can answer."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.executor.model.store import Store
from symbiosis.protocol import (
    DTYPES,
    FLOATS,
    HEAD_SIZE,
    MAX_DIM,
    MAX_GROUP,
    SEED_BYTES,
    Call,
    Layer,
    Op,
    Priority,
    View,
    call_body,
    encode_call,
)
from symbiosis.transport.tensors import TORCH_DTYPE

IN, OUT, MATRICES = 8, 16, 3
FILLED = {
    "layer": 1, "dtype": "int32", "shape": (0,), "bias": True, "view": View((), (), 0), "groups": 1, "gradient": True,
    "also": (0,), "seeded": True, "columns": True,
}  # fmt: skip
EMPTY = {name: getattr(Call(Op.STATS, 0, "float32"), name) for name in FILLED}
ODD_SHAPES: list[tuple[int, ...]] = [
    (), (0,), (0, 0), (1,) * MAX_DIM, (2**62,), (2**40, 2**40), (0, 2**62), (2**63 - 1,) * MAX_DIM, (1, 0, 1), (7, 7),
]  # fmt: skip


class Experts(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(*shape))


class EveryKind(nn.Module):
    """A layer of each kind that an executor knows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.plain = nn.Linear(IN, OUT), nn.Linear(IN, OUT, bias=False)
        self.conv, self.embedding = Conv1D(OUT, IN), nn.Embedding(10, IN)
        self.experts, self.norm = Experts(MATRICES, OUT, IN), nn.LayerNorm(IN)
        self.cube = nn.Parameter(torch.zeros(1, 1, 1, 1, 1, 2))  # of more dimensions than travel


def only_used(call: Call) -> Call:
    """The call without what its op does not use."""
    groups = {"groups": max(1, call.groups)} if call.op is Op.GROUPED else {}
    return replace(call, **{name: empty for name, empty in EMPTY.items() if name not in call.op.traits.uses}, **groups)


class Calls:
    """Calls of every op and view on the layers of `EveryKind`, right and wrong ones."""

    def __init__(self, manifest: Sequence[Layer], seed: int) -> None:
        self.chance = random.Random(seed)
        self._layers = {kind: [n for n, layer in enumerate(manifest) if layer.kind == kind] for kind in
                        ("linear", "conv1d", "tensor", "embedding", "client")}  # fmt: skip
        self._shapes = [layer.shape for layer in manifest]
        self._biased = {number for number, layer in enumerate(manifest) if layer.bias}
        self.by_op: dict[Op, Callable[[int], Call]] = {
            Op.FORWARD: self._rows, Op.DGRAD: self._rows, Op.PRODUCT: self._by_view, Op.LEFT: self._by_view,
            Op.GROUPED: self._grouped, Op.LOOKUP: self._lookup, Op.NORMS: self._norms, Op.READ: self._read,
            Op.ECHO: self._echo, Op.STATS: lambda rows: Call(Op.STATS, 0, "float32"),
        }  # fmt: skip

    def right(self) -> Call:
        """One that can be answered."""
        self._op = self.chance.choice(list(Op))
        call = self.by_op[self._op](self.chance.choice((0, 1, 1, 2, 5)))
        gradient = "gradient" in call.op.traits.uses and self.chance.random() < 0.5
        return replace(call, priority=self.chance.choice(list(Priority)), gradient=gradient)

    def spoilt(self) -> Call:
        """A right one, with up to three fields that say something else: mostly such as its op does not use."""
        call = self.right()
        unused = [name for name in FILLED if name not in call.op.traits.uses]
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            names = unused if unused and self.chance.random() < 0.7 else list(FILLED)
            name = self.chance.choice(names)
            call = replace(call, **{name: self._anything(name)})
        return call

    def body(self, call: Call) -> bytes:
        """The header of a call without its number; now and then with a byte of it changed."""
        raw = bytearray(call_body(call))
        if self.chance.random() < 0.1:
            raw[self.chance.randrange(len(raw))] = self.chance.randrange(256)
        return bytes(raw)

    def payload(self, nbytes: int) -> bytes:
        return bytes(nbytes) if self.chance.random() < 0.7 else self.chance.randbytes(nbytes)

    def _anything(self, name: str) -> object:
        chance = self.chance
        return {
            "layer": lambda: chance.choice((*range(len(self._shapes) + 2), 2**32 - 1)),
            "dtype": lambda: chance.choice(DTYPES),
            "shape": lambda: chance.choice((*ODD_SHAPES, (2, IN), (2, OUT))),
            "view": lambda: chance.choice((View((), (), 0), View((2**62,), (0,), 0), View((2, 2), (1, 2**62), 2**62), self._view(4)[0])),
            "groups": lambda: chance.choice((1, MATRICES, 2**32 - 1)),
            "also": lambda: tuple(chance.randrange(len(self._shapes) + 1) for _ in range(chance.randrange(1, MAX_GROUP))),
        }.get(name, lambda: True)()  # fmt: skip

    def _float(self) -> str:
        return self.chance.choice(sorted(FLOATS))

    def _rows(self, rows: int) -> Call:
        group = self.chance.sample([*self._layers["linear"], *self._layers["conv1d"]], self.chance.choice((1, 1, 2, 3)))
        width = IN if self._op is Op.FORWARD else OUT * len(group)
        dtype = self.chance.choice(("int32", self._float(), self._float()))
        bias = self._op is Op.FORWARD and dtype != "int32" and set(group) <= self._biased
        call = Call(self._op, group[0], dtype, (rows, width), bias, also=tuple(group[1:]))
        return replace(call, seeded=dtype == "int32" and self.chance.random() < 0.5)

    def _view(self, count: int) -> tuple[View, int]:
        """A view that lies within so many numbers, of two dimensions or three."""
        size = tuple(self.chance.choice((1, 2, 3)) for _ in range(self.chance.choice((2, 3))))
        stride = tuple(self.chance.choice((0, 1, 2)) for _ in size)
        last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        return View(size, stride, self.chance.randrange(max(1, count - last))), size[-2]

    def _by_view(self, rows: int) -> Call:
        number = self.chance.choice([*self._layers["linear"], *self._layers["conv1d"], *self._layers["tensor"]])
        view = self._view(prod(self._shapes[number]))[0] if self.chance.random() < 0.7 else None
        *stack, k, n = view.size if view else self._shapes[number]
        shape = (*stack, rows, k) if self._op is Op.PRODUCT else (*stack, n, rows)
        columns = len(shape) == 3 and self.chance.random() < 0.5
        return Call(self._op, number, self._float(), shape, view=view, columns=columns)

    def _grouped(self, rows: int) -> Call:
        number = self.chance.choice(self._layers["tensor"])
        turned = self.chance.random() < 0.5
        view = View((MATRICES, IN, OUT), (IN * OUT, 1, IN), 0) if turned else None
        dtype = self.chance.choice(("float32", "bfloat16", "float16"))
        return Call(Op.GROUPED, number, dtype, (rows, IN if turned else OUT), view=view, groups=MATRICES)

    def _lookup(self, rows: int) -> Call:
        return Call(Op.LOOKUP, self._layers["embedding"][0], self._float(), (rows,))

    def _norms(self, rows: int) -> Call:
        return Call(Op.NORMS, self.chance.choice([*self._layers["linear"], *self._layers["conv1d"]]), self._float())

    def _read(self, rows: int) -> Call:
        number = self.chance.randrange(len(self._shapes))
        view = self._view(prod(self._shapes[number]))[0] if self.chance.random() < 0.5 else None
        return Call(Op.READ, number, self.chance.choice(DTYPES), view=view)

    def _echo(self, rows: int) -> Call:
        return Call(Op.ECHO, 0, self.chance.choice(DTYPES), (rows, self.chance.choice((1, 3, 8))))


def header(body: bytes, seq: int) -> bytes:
    return encode_call(Call(Op.STATS, 0, "float32"), seq)[:HEAD_SIZE] + body


# ---------------------------------------------------------------- calls that are cut into several cells

K, N, G = 160, 1100, 5  # N: several panels, and what is left over


class WideKinds(nn.Module):
    """Layers of each kind that are cut into several cells."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(K, N)
        self.plain = nn.Linear(K, N + 200, bias=False)
        self.conv = Conv1D(N, K)
        self.embedding = nn.Embedding(700, K)
        self.experts = Experts(G, K, N)
        self.to(dtype)


WEIGHT = View((N, K), (K, 1), 0)
EXPERT = View((K, N), (N, 1), 2 * K * N)
STACK = View((G, K, N), (0, N, 1), 0)  # one expert, expanded


@cache
def wide_store() -> Store:
    return Store(WideKinds(), serve=["*"], integers=(8, 16))


@st.composite
def wide_calls(draw: st.DrawFn, few: st.SearchStrategy[int] = st.integers(1, 300)) -> Call:  # noqa: B008
    """A valid call of any op on the layers of `WideKinds`."""
    number = {layer.name: number for number, layer in enumerate(wide_store().manifest)}
    linear, plain, conv, experts = number["linear"], number["plain"], number["conv"], number["experts.up"]
    T, dtype = draw(few), draw(st.sampled_from(("float32", "float64", "bfloat16", "float16")))
    return draw(
        st.sampled_from(
            (
                Call(Op.FORWARD, linear, dtype, (T, K), bias=True),
                Call(Op.FORWARD, linear, dtype, (T, K), bias=True, also=(conv,)),
                Call(Op.FORWARD, linear, dtype, (T, K), also=(plain, conv)),
                Call(Op.DGRAD, linear, dtype, (T, 2 * N), also=(conv,)),
                Call(Op.FORWARD, plain, "int32", (T, K)),
                Call(Op.FORWARD, linear, "int64", (T, K), also=(conv,), seeded=True),
                Call(Op.DGRAD, linear, "int64", (T, 2 * N), also=(conv,), seeded=True),
                Call(Op.PRODUCT, linear, dtype, (T, N), view=WEIGHT),
                Call(Op.PRODUCT, experts, dtype, (T, K), view=EXPERT),
                Call(Op.PRODUCT, experts, dtype, (G, T, K), view=View((G, K, N), (K * N, N, 1), 0)),
                Call(Op.PRODUCT, experts, dtype, (G, T, K), view=STACK),
                Call(Op.LEFT, linear, dtype, (K, T), view=WEIGHT),
                Call(Op.LEFT, experts, dtype, (G, N, T)),
                Call(Op.PRODUCT, experts, dtype, (G, T, K), view=STACK, columns=True),
                Call(Op.LEFT, experts, dtype, (G, N, T), columns=True),
                Call(Op.GROUPED, experts, "float32", (T, K), groups=G),
                Call(Op.LOOKUP, number["embedding"], dtype, (T,)),
                Call(Op.NORMS, linear, "float32"),
                Call(Op.NORMS, conv, "float64"),
                Call(Op.READ, experts, dtype),
                Call(Op.READ, linear, dtype, view=View((2, N, 80), (80, K, 1), 0)),
                Call(Op.ECHO, 0, dtype, (T, 7, 3)),
            )
        )
    )


def payload_of(call: Call) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    if call.op is Op.LOOKUP:
        return (torch.randint(0, 700, call.shape),)
    if call.seeded:
        return (torch.arange(SEED_BYTES, dtype=torch.uint8),)
    if call.op in (Op.READ, Op.NORMS):
        return ()
    values = torch.randn(call.payload_shape) if call.dtype[:3] != "int" else torch.randint(-(2**30), 2**30, call.shape)
    x = values.to(TORCH_DTYPE[call.dtype])
    if call.op is not Op.GROUPED:
        return (x,)
    ends = torch.randint(0, call.rows + 1, (call.groups,)).sort().values
    return x, ends.to(torch.int32)


# ---------------------------------------------------------------- calls that need memory

LARGE_K, LARGE_N = 1024, 6000


@cache
def large_store() -> Store:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(LARGE_K, LARGE_N, dtype=torch.bfloat16)
            self.narrow = nn.Linear(64, LARGE_N, dtype=torch.bfloat16)
            self.experts = nn.ModuleList()
            self.embedding = nn.Embedding(6000, 1024, dtype=torch.bfloat16)

    class LargeExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(8, LARGE_K, 1024, dtype=torch.bfloat16))

    model = Model()
    model.experts = LargeExperts()  # type: ignore[assignment]
    return Store(model, serve=["*"], integers=(8, 16))


def heavy_calls() -> list[Call]:
    """Each needs more memory than its payload and its reply."""
    store = large_store()
    number = {layer.name: number for number, layer in enumerate(store.manifest)}
    linear, experts, embedding = number["linear"], number["experts.up"], number["embedding"]
    odd = View((LARGE_N // 2, LARGE_K // 2), (2 * LARGE_K, 2), 0)  # no library multiplies by that as it lies there
    return [
        Call(Op.FORWARD, linear, "float32", (2000, LARGE_K), bias=True),
        Call(Op.FORWARD, linear, "float64", (10, LARGE_K)),
        Call(Op.DGRAD, number["narrow"], "bfloat16", (2000, LARGE_N)),  # few CPUs are fast at that
        Call(Op.FORWARD, linear, "int32", (1000, LARGE_K), seeded=True),
        Call(Op.FORWARD, linear, "int64", (500, LARGE_K)),
        Call(Op.PRODUCT, linear, "bfloat16", (100, LARGE_N // 2), view=odd),
        Call(Op.PRODUCT, experts, "float32", (8, 200, LARGE_K)),
        Call(Op.PRODUCT, experts, "float64", (8, 10, LARGE_K), view=View((8, LARGE_K, 1024), (0, 1024, 1), 0)),
        Call(Op.LEFT, linear, "float64", (LARGE_K, 50), view=View((LARGE_N, LARGE_K), (LARGE_K, 1), 0)),
        Call(Op.GROUPED, experts, "float32", (3000, LARGE_K), groups=8),
        Call(Op.LOOKUP, embedding, "float64", (6000,)),
        Call(Op.NORMS, linear, "float64"),
        Call(Op.READ, linear, "float64"),
        Call(Op.ECHO, 0, "float32", (4000, 1000)),
    ]
