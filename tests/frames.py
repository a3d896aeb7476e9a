"""Calls of every op for tests, with and without what their op does not use."""

from msgspec.structs import replace

from symbiosis.protocol import USES, Call, Op, View

FILLED = {
    "layer": 1, "dtype": "int32", "shape": (0,), "bias": True, "view": View((), (), 0), "groups": 1, "gradient": True,
    "also": (0,), "seeded": True,
}  # fmt: skip
EMPTY = {name: getattr(Call(Op.STATS, 0, "float32"), name) for name in FILLED}


def only_used(call: Call) -> Call:
    """The call without what its op does not use."""
    groups = {"groups": max(1, call.groups)} if call.op is Op.GROUPED else {}
    return replace(call, **{name: empty for name, empty in EMPTY.items() if name not in USES[call.op]}, **groups)
