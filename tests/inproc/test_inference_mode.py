"""Under `torch.inference_mode` torch hands over operations as they were written: a remote weight makes of them what it makes elsewhere."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.errors import WeightRead
from symbiosis.transport.local.segment import Slab
from tests.conftest import MODELS, tiny_llama, tiny_mixtral


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_experts(experts: str, reads: bool, serve: Callable, ids: Tensor) -> None:
    base = tiny_mixtral()
    split = symbiosis.wrap(copy.deepcopy(base), serve(base, allow_read=reads).endpoint)
    for model in (base, split):
        model.set_experts_implementation(experts)
    with torch.inference_mode():
        expected = base(ids).logits
        assert torch.equal(split(ids).logits, expected)
        assert torch.equal(split.generate(ids, max_new_tokens=3), base.generate(ids, max_new_tokens=3))
    with torch.no_grad():
        assert torch.equal(split(ids).logits, expected)


def test_a_grouped_product_takes_no_other_dtype_than_unsplit(serve: Callable) -> None:
    base = tiny_mixtral()
    split = symbiosis.wrap(copy.deepcopy(base), serve(base, share_weights=False).endpoint)
    for model in (base, split):
        weight = model.model.layers[0].mlp.experts.gate_up_proj.transpose(-2, -1)
        rows, ends = torch.ones(3, weight.shape[1]), torch.full((weight.shape[0],), 3, dtype=torch.int32)
        for given in (None, torch.float32):
            assert torch.nn.functional.grouped_mm(rows, weight, offs=ends, out_dtype=given).dtype is torch.float32
        with pytest.raises(RuntimeError, match="output dtype must match"):
            torch.nn.functional.grouped_mm(rows, weight, offs=ends, out_dtype=torch.bfloat16)


def test_what_was_used_there_can_be_trained_with_later(serve: Callable, ids: Tensor) -> None:
    for build in MODELS.values():
        base = build().requires_grad_(False)
        split = symbiosis.wrap(copy.deepcopy(base), serve(base).endpoint)
        gradients = []
        for model in (base, split):
            with torch.inference_mode():
                model(ids), model(ids)
            embedding = model.get_input_embeddings().requires_grad_(True)
            model(input_ids=ids, labels=ids).loss.backward()
            gradients.append(embedding.weight.grad)
        assert torch.equal(*gradients)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_what_a_connection_keeps_is_used_in_any_mode(
    share: bool, joined: bool, serve: Callable, llama: nn.Module, ids: Tensor, tmp_path: Path
) -> None:
    """Segments and mapped weights may be made under inference_mode, by the first call of a copy, too."""
    executor = serve(llama, listen=[f"local://{tmp_path}/executor.sock"], share_weights=True)
    split = symbiosis.wrap(copy.deepcopy(llama), executor.endpoint, share=share)
    if not joined:
        raw = pickle.dumps(split)
        symbiosis.unwrap(split, llama.state_dict())
        split = pickle.loads(raw)
    gradients = []
    for model in (llama, split):
        with torch.inference_mode():
            model(ids)
        with torch.no_grad():
            model(ids)
        embedding = model.requires_grad_(False).get_input_embeddings().requires_grad_(True)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(embedding.weight.grad)
    assert torch.equal(*gradients)


def test_a_segment_that_grows_is_used_in_any_mode() -> None:
    with torch.inference_mode():
        slab = Slab.create(8192)
        rows = slab.tensor(4096, "float32", (2, 3))
    with torch.no_grad():
        assert rows.fill_(2.0).sum() == 12
    slab.close()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda w: w, "t": lambda w: w.t(), "T": lambda w: w.T, "mT": lambda w: w.mT, "H": lambda w: w.H,
    "adjoint": lambda w: w.adjoint(), "transpose": lambda w: w.transpose(0, 1), "swapaxes": lambda w: w.swapaxes(0, 1),
    "permute": lambda w: w.permute(1, 0), "movedim": lambda w: w.movedim(0, 1), "data": lambda w: w.data,
    "detach": lambda w: w.detach(), "alias": lambda w: torch.ops.aten.alias(w), "rows": lambda w: w[3:9],
    "columns": lambda w: w[:, 2:4], "every other": lambda w: w[::2], "row": lambda w: w[1:2], "narrow": lambda w: w.narrow(0, 1, 3),
    "view": lambda w: w.view(32, 128), "reshape": lambda w: w.reshape(128, 32), "view_as": lambda w: w.view_as(torch.empty(16, 256)),
    "chunk": lambda w: w.chunk(2)[1], "split": lambda w: w.split([60, 4])[1], "tensor_split": lambda w: w.tensor_split(3)[1],
    "unsafe_chunk": lambda w: w.unsafe_chunk(2)[1], "hsplit": lambda w: w.hsplit(2)[1], "unbind": lambda w: w[None].unbind(0)[0],
    "unflatten": lambda w: w.unflatten(0, (2, 32))[1], "flatten": lambda w: w.flatten()[None], "expand": lambda w: w[0].expand(5, 64),
    "squeeze": lambda w: w[None].squeeze(0), "contiguous": lambda w: w.contiguous(), "conj": lambda w: w.conj(), "real": lambda w: w.real,
    "diagonal": lambda w: w.view(8, 8, 64).diagonal(dim1=0, dim2=1), "unfold": lambda w: w[0].unfold(0, 4, 2),
    "float64": lambda w: w.to(torch.float64), "double": lambda w: w.double(), "bfloat16": lambda w: w.bfloat16(), "type": lambda w: w.type(torch.float64),
    "cpu": lambda w: w.cpu(), "parameter": lambda w: nn.Parameter(w.t(), requires_grad=False), "clone": lambda w: w.clone(),
}  # fmt: skip


@pytest.fixture(scope="module")
def weights() -> Any:
    """A weight, and the same one in an executor."""
    base = tiny_llama()
    with symbiosis.Executor(copy.deepcopy(base)) as executor:
        split = symbiosis.wrap(copy.deepcopy(base), executor.endpoint)
        yield [model.model.layers[0].self_attn.q_proj.weight for model in (base, split)]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, mode: Callable, weights: list[Tensor]) -> None:
    torch.manual_seed(0)
    with mode():
        plain, remote = (VIEWS[view](weight) for weight in weights)
        assert plain.shape == remote.shape and plain.stride() == remote.stride() and plain.dtype == remote.dtype
        x = torch.randn(3, plain.shape[-1], dtype=plain.dtype)
        assert torch.equal(x @ remote.transpose(-2, -1), x @ plain.transpose(-2, -1))
        assert torch.equal(
            nn.functional.linear(x[None], remote.detach()), nn.functional.linear(x[None], plain.detach())
        )
    x.requires_grad_(not x.is_inference())
    if x.requires_grad and not plain.is_inference():  # a view that was taken in one mode is used in another
        (x @ remote.transpose(-2, -1)).sum().backward()
        gradient, x.grad = x.grad, None
        (x @ plain.transpose(-2, -1)).sum().backward()
        assert torch.equal(gradient, x.grad)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_reading_is_refused_by_name(mode: Callable, weights: list[Tensor]) -> None:
    reads: list[Callable[[Tensor], Any]] = [
        lambda w: w.norm(), lambda w: w[torch.tensor([1])], lambda w: w * 2, lambda w: w.t().contiguous(), lambda w: w.view(torch.int32),
        lambda w: torch.linalg.svd(w), lambda w: w.sum(), lambda w: torch.view_copy(w, (4096,)), lambda w: torch.cat([w, w]),
    ]  # fmt: skip
    for read in reads:
        with mode(), pytest.raises(WeightRead, match=r"q_proj.*test_inference_mode\.py"):
            read(weights[1])


METHODS: dict[str, Callable[[], PeftConfig]] = {
    "lora": lambda: LoraConfig(init_lora_weights=False, target_modules=["q_proj"]),
    "dora": lambda: LoraConfig(init_lora_weights=False, target_modules=["q_proj"], use_dora=True),
    "miss": lambda: peft.MissConfig(r=4, init_weights=False, target_modules=["q_proj"]),
    "shira": lambda: peft.ShiraConfig(r=4, target_modules=["q_proj"]),
    "hra": lambda: peft.HRAConfig(r=4, init_weights=False, target_modules=["q_proj"]),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, init_weights=False, target_modules=["q_proj"]),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, init_weights=False, target_modules=["q_proj"]),
    "loha": lambda: peft.LoHaConfig(r=4, init_weights=False, target_modules=["q_proj"]),
    "vera": lambda: peft.VeraConfig(r=4, init_weights=False, target_modules=["q_proj"]),
    "parameters": lambda: LoraConfig(
        init_lora_weights=False, target_modules=["q_proj"], target_parameters=["o_proj.weight"]
    ),
}
WITHOUT_READING_SINCE = {"dora": "0.19", "shira": "0.20"}
LAST_BITS = {"dora", "hra", "shira", "parameters"}  # as compat_peft.py lists them: sums of two products


@pytest.mark.parametrize("method", METHODS)
def test_adapters(method: str, llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    if method in WITHOUT_READING_SINCE:
        pytest.importorskip("peft", minversion=WITHOUT_READING_SINCE[method], reason=f"{method} of older PEFT reads")
    logits = []
    for model in (copy.deepcopy(llama), symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint)):
        torch.manual_seed(3)
        adapted = get_peft_model(model, METHODS[method]()).eval()
        torch.manual_seed(4)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn(parameter.shape) / 10
        with torch.inference_mode():
            inferred = adapted(ids).logits
        with torch.no_grad():
            assert torch.equal(adapted(ids).logits, inferred)
        logits.append(inferred)
    if method in LAST_BITS:
        torch.testing.assert_close(*logits, atol=5e-6, rtol=1e-5)
    else:
        assert torch.equal(*logits)
