"""Tensors cut into frames and put together again."""

from collections import Counter
from pathlib import Path

import pytest
import torch

import symbiosis
from symbiosis.errors import Code, ProtocolError
from symbiosis.executor.batch import Batch
from symbiosis.executor.engine import Engine
from symbiosis.transport import frames
from symbiosis.transport.frames import FRAME_BYTES, Framed, check, frames_of, lengths
from tests.conftest import tiny_llama
from tests.processes import Bystander
from tests.realm import Realm

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 5 * FRAME_BYTES // 2])
def test_what_is_cut_is_put_together(nbytes: int) -> None:
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    cut = frames_of(tensor)
    assert tuple(map(len, cut)) == lengths(nbytes)
    assert all(length == FRAME_BYTES for length in lengths(nbytes)[:-1])
    check(list(map(len, cut)), (nbytes,))
    assert torch.equal(Framed(cut, "uint8", (nbytes,)).whole(), tensor)


def test_only_what_is_needed_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows from the middle, whose first and last frame hold others' rows, too; and then all."""
    monkeypatch.setattr(frames, "FRAME_BYTES", 64)
    tensor = torch.arange(400.0).view(40, 10)
    framed = Framed(frames_of(tensor), "float32", (40, 10))
    framed.tensor.zero_()
    framed.need(framed.tensor[10:20])
    assert torch.equal(framed.tensor[10:20], tensor[10:20])
    assert not framed.tensor[:9].any() and not framed.tensor[22:].any()
    framed.need(framed.tensor[10:20])
    framed.need(framed.tensor[:0])
    assert not framed.tensor[:9].any()
    framed.need(framed.tensor[:10])
    assert torch.equal(framed.tensor[:20], tensor[:20]) and not framed.tensor[22:].any()
    assert torch.equal(framed.whole(), tensor)


@pytest.mark.parametrize(
    ("sizes", "parts", "why"),
    [
        ([], (1,), "promises 1 bytes, 0 came"),
        ([4, 5], (8,), "promises 8 bytes, 9 came"),
        ([MIB], (2**62,), f"promises {2**62} bytes"),
        ([4, 4], (8,), "8 bytes came in 2 frames"),
        ([8, 0], (8,), "8 bytes came in 2 frames"),
        ([4, 8], (8, 4), "12 bytes came in 2 frames"),
        ([MIB - 1, 2], (MIB + 1,), "in 2 frames"),
        ([MIB + 1], (MIB + 1,), "in 1 frames"),
    ],
)
def test_frames_that_are_not_what_was_promised(sizes: list[int], parts: tuple[int, ...], why: str) -> None:
    with pytest.raises(ProtocolError, match=why) as refused:
        check(sizes, parts)
    assert refused.value.code is Code.BAD_FRAME


def test_a_model_whose_calls_come_in_many_frames(tmp_path: Path) -> None:
    """... and are cut into slices, because another tenant calls: outputs, and gradients of layers that are asked together."""
    realm = Realm(tmp_path)
    realm.let_in("bob")
    slices, compute = Counter[str](), Engine.compute

    def count(engine: Engine, batch: Batch) -> float:
        slices[batch.key.op.name] += any(not (piece.last and piece.start == 0) for piece in batch.slices)  # type: ignore[attr-defined]
        return compute(engine, batch)

    with pytest.MonkeyPatch.context() as patched, Bystander(realm.endpoint("bob"), tiny_llama()) as bob:
        patched.setattr(Engine, "compute", count)
        plain = tiny_llama()
        split = symbiosis.wrap(tiny_llama(), realm.endpoint("alice"))
        x = torch.randn(50, 120, 64, generator=torch.Generator().manual_seed(0))
        found = []
        for model in (plain, split):
            inputs = x.clone().requires_grad_()
            logits = model(inputs_embeds=inputs).logits
            logits.square().sum().backward()
            found += [logits.detach(), inputs.grad]
        bob.goes_on()
    logits, gradient, split_logits, split_gradient = found
    torch.testing.assert_close(split_logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-4, atol=1e-4)
    assert slices["FORWARD"] > 4 and slices["DGRAD"] > 4
    realm.executor.close()
