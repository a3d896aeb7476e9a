"""The ops that a layer can be asked for, and the version of the protocol. To add one, begin with `Op` and `TRAITS`."""

from enum import IntEnum
from typing import NamedTuple

VERSION = 16  # rises with what goes over the wire: tests/inproc/test_wire.py
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1}
FLOATS = frozenset(("float32", "bfloat16", "float16", "float64"))
WEIGHT_BITS = {"int32": 8, "int64": 16}  # bits of the weights that multiply integers modulo 2^32 or 2^64
SEED_BYTES = 32
MAX_DIM = 5  # dimensions; a convolution over video, which a client may read, has so many
MAX_GROUP = 8  # most layers that a call may name


class Op(IntEnum):
    """What a call asks of a layer. `W` is its weight as the unsplit layer holds it, `V` a strided view of that."""

    FORWARD = 0  # y = x Wᵀ (+ b): what the layer computes
    DGRAD = 1  # dx = dy W: the gradient of its input
    PRODUCT = 2  # y = x V (+ b, if V makes some outputs of a layer)
    LEFT = 3  # y = V x
    GROUPED = 4  # y[rows of group g] = x[rows of group g] V[g]
    LOOKUP = 5  # rows of an embedding by their ids
    NORMS = 6  # squared norm of each output row of W, in float32 or wider
    READ = 7  # V itself, where the provider allows it
    ECHO = 8  # the payload comes back: a round trip with no arithmetic
    STATS = 9  # a snapshot of the executor's figures, as msgpack

    traits: "Traits"


class Traits(NamedTuple):
    """The properties of an op that more than one module asks for.

    Tables in `executor/calls` say how each op is priced, cut, checked and computed, and `protocol/shapes.py` has the shape of its
    reply. A test holds that no table lacks an op.
    """

    uses: frozenset[str]  # the call's fields besides `op` and `priority`; all others must be empty (`checked`)
    by_rows: bool = False  # each row of the payload makes one row of the reply
    activations: bool = False  # the payload holds values of a forward pass, which should be finite
    multiplies: bool = False  # it is a matrix product, which a GPU may ask for, or a client make with mapped weights
    by_transpose: bool = False  # it multiplies by the transpose of W; only an op of whole layers does
    indices: bool = False  # the last tensor of the payload holds indices, which are checked
    open_ended: bool = False  # nobody knows before how many bytes the reply has

    @property
    def has_payload(self) -> bool:
        return "shape" in self.uses

    @property
    def of_whole_layers(self) -> bool:
        """Whether it multiplies rows by whole linear layers. Only such ops take groups, integers and masked rows."""
        return "also" in self.uses


_BY_VIEW = frozenset(("layer", "dtype", "shape", "view", "gradient"))
TRAITS: dict[Op, Traits] = {
    Op.FORWARD: Traits(
        frozenset(("layer", "dtype", "shape", "bias", "gradient", "also", "seeded")),
        by_rows=True,
        activations=True,
        multiplies=True,
        by_transpose=True,
    ),
    Op.DGRAD: Traits(frozenset(("layer", "dtype", "shape", "also", "seeded")), by_rows=True, multiplies=True),
    Op.PRODUCT: Traits(_BY_VIEW | {"bias", "columns"}, by_rows=True, activations=True, multiplies=True),
    Op.LEFT: Traits(_BY_VIEW | {"columns"}, activations=True, multiplies=True),
    Op.GROUPED: Traits(_BY_VIEW | {"groups"}, activations=True, multiplies=True, indices=True),
    Op.LOOKUP: Traits(frozenset(("layer", "dtype", "shape")), indices=True),
    Op.NORMS: Traits(frozenset(("layer", "dtype"))),
    Op.READ: Traits(frozenset(("layer", "dtype", "view"))),
    Op.ECHO: Traits(frozenset(("dtype", "shape"))),
    Op.STATS: Traits(frozenset(), open_ended=True),
}
for _op, _traits in TRAITS.items():
    _op.traits = _traits


class Priority(IntEnum):
    """Lower runs first."""

    DECODE = 0
    PREFILL = 1
    TRAIN = 2
