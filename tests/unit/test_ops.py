"""Every op is in every table that goes by ops: whoever adds one is told here what else to write."""

import pytest
import torch

from symbiosis.client.direct.mapped import ANSWERS
from symbiosis.client.privacy.verify import Proofs
from symbiosis.executor.calls.cell_ops import CellOps
from symbiosis.executor.calls.price import PRICES
from symbiosis.executor.calls.validation import CHECKS
from symbiosis.executor.compute.products import ONE_PRODUCT, Products
from symbiosis.executor.model.store import Store
from symbiosis.protocol import Call, Op
from symbiosis.protocol.ops import TRAITS
from symbiosis.protocol.shapes import SHAPES
from tests.frames import Calls, EveryKind, heavy_calls

OF_A_LAYER = {op for op in Op if "layer" in op.traits.uses}
ANSWERED = set(Op) - {Op.STATS}  # which becomes an ECHO of the figures
NOT_BY_ROWS = {op for op in ANSWERED if not op.traits.by_rows} | {Op.PRODUCT}  # which may be of a stack
STORE = Store(EveryKind(), ["*"])


TABLES = {  # where each table is, what it has, and which ops belong there
    "symbiosis/protocol/ops.py TRAITS": (TRAITS, set(Op)),
    "symbiosis/protocol/shapes.py SHAPES": (SHAPES, ANSWERED),
    "symbiosis/executor/calls/validation.py CHECKS": (CHECKS, OF_A_LAYER),
    "symbiosis/executor/calls/price.py PRICES": (PRICES, ANSWERED),
    "symbiosis/executor/calls/cell_ops.py Ops.makes": (CellOps(STORE, lambda tensor: tensor).makes, NOT_BY_ROWS),
    "symbiosis/client/direct/mapped.py ANSWERS": (ANSWERS, OF_A_LAYER - {Op.FORWARD, Op.DGRAD}),
    "tests/frames.py Calls.by_op": (Calls(STORE.manifest, 0).by_op, set(Op)),
    "tests/frames.py heavy_calls": ({call.op for call in heavy_calls()}, ANSWERED),
}


@pytest.mark.parametrize("where", TABLES)
def test_no_table_lacks_an_op(where: str) -> None:
    table, ops = TABLES[where]
    missing, beyond = ops - set(table), set(table) - ops
    assert not missing, f"{where} lacks {', '.join(op.name for op in missing)}"
    assert not beyond, f"{where} has {', '.join(op.name for op in beyond)}, which it need not have"


def test_traits_name_fields_of_a_call() -> None:
    fields = set(Call.__struct_fields__) - {"op", "priority"}
    assert set().union(*(op.traits.uses for op in Op)) == fields
    assert {op.name for op in Op if op.traits.indices} == {"GROUPED", "LOOKUP"}
    assert {op.name for op in Op if not op.traits.has_payload} == {"NORMS", "READ", "STATS"}
    assert {op.name for op in Op if op.traits.of_whole_layers} == {"FORWARD", "DGRAD"}
    assert {op.name for op in Op if op.traits.multiplies} == {"FORWARD", "DGRAD", "PRODUCT", "LEFT", "GROUPED"}
    assert {op.name for op in Op if op.traits.activations} == {"FORWARD", "PRODUCT", "LEFT", "GROUPED"}


def test_every_op_that_is_masked_has_a_proof() -> None:
    """A private session sends rows by no other op (`PrivateSession.call`)."""
    masked = {(0, op) for op in Op if op.traits.of_whole_layers}
    for learn in (
        lambda proofs: proofs.learn_floats(0, torch.randn(8, 16)),
        lambda proofs: proofs.learn_integers(0, torch.zeros(1, 8, 16, dtype=torch.int8)),
    ):
        proofs = Proofs()
        learn(proofs)
        assert set(proofs._known) == masked


def test_every_op_by_rows_has_its_product() -> None:
    assert {op for op in Op if op.traits.by_rows} == {*ONE_PRODUCT, Op.DGRAD}


def test_an_op_that_products_do_not_know_is_refused() -> None:
    """It must not be answered with x W, as if it were FORWARD."""
    x, call = torch.randn(2, 16), Call(op=Op.LEFT, layer=0, dtype="float32", shape=(2, 16))
    for multiply in (
        lambda: Products(STORE).multiply(call, [x]),
        lambda: list(Products(STORE).panels(call, [x], slice(0, 1), 16)),
    ):
        with pytest.raises(
            NotImplementedError, match="LEFT goes by rows: say in symbiosis/executor/compute/products.py"
        ):
            multiply()
