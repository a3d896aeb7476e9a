"""Layers that are compiled train adapters as they do when they are not."""

import pytest
import torch
from peft import LoraConfig

from symbiosis.serving.runner.compiled_layers import compile_layers
from symbiosis.training.captured_pass import acting_groups
from symbiosis.training.low_rank import LowRankSegment
from symbiosis.training.packed_model import PackedModel
from symbiosis.training.run_adapter import RunAdapter
from symbiosis.training.sequence_packing import PackLayout, packed_as
from tests.conftest import tiny_llama


@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj", "v_proj", "down_proj"],
        pytest.param("all-linear", marks=pytest.mark.full),
        pytest.param(["up_proj"], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_gradients_of_compiled_layers(targets: list[str] | str) -> None:
    found = []
    for backend in (None, "aot_eager"):
        model = PackedModel(tiny_llama(), compiled=False)
        adapter = RunAdapter(model.skeleton, LoraConfig(r=4, target_modules=targets, init_lora_weights=False), seed=0)
        model.add(adapter)
        for flat in adapter.flats:
            flat.begin_gradients()
        if backend is not None:
            torch._dynamo.reset()
            assert compile_layers(model._model, 2, backend) == 2
        layout = PackLayout((5, 4), packed=True)
        model._acting.segments = [LowRankSegment(slice(2, 9), adapter.low_rank)]
        model._acting.groups = acting_groups([adapter], model._groups)
        embedding = model._model.get_input_embeddings()  # type: ignore[operator]
        embedding.register_forward_hook(lambda module, inputs, y: y.requires_grad_())
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            tokens = [torch.randint(3, 100, (length,), generator=generator) for length in layout.lengths]
            with packed_as(layout):
                hidden = model._hidden(layout.inputs(tokens, model.device))
            hidden.square().sum().backward()
        found.append([hidden.detach(), *(flat.gradients for flat in adapter.flats)])
    for eager, compiled in zip(*found, strict=True):
        assert float((eager - compiled).abs().max()) <= 1e-5 * float(eager.abs().max()) and eager.any()
