"""Decoder layers under torch.compile: layers that see the same rows are one product there, too, and compute what they did."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis.serving.runner.compiled_layers import compile_layers, put_in_place

GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("self_attn", ("o_proj",)), ("mlp", ("gate_proj", "up_proj")), ("mlp", ("down_proj",)))  # fmt: skip


def test_a_group_is_computed_once() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    calls: list[int] = []

    def put(parent: Any, names: tuple[str, ...]) -> None:
        layers = [getattr(parent, name) for name in names]
        before = [layer.forward for layer in layers]

        def products(x: Tensor) -> list[Tensor]:
            calls.append(len(layers))
            return [forward(x) for forward in before]

        put_in_place(layers, products, [layer.out_features for layer in layers])

    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    ids = torch.arange(5)[None]
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        for layer in model.model.layers:
            for parent, names in GROUPS:
                put(getattr(layer, parent), names)
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        assert calls == [3, 1, 2, 1] * 2
        assert compile_layers(model, 2, backend) == 2
        for _ in range(2):
            calls.clear()
            assert torch.equal(model(ids, use_cache=False).logits, expected)
            assert calls == [3, 1, 2, 1] * 2
    assert len(graphs) == 1  # one compilation serves all layers
    assert sum("adapted_products" in target for target in graphs[0]) == len(GROUPS)


def test_layers_called_with_other_rows_than_the_first_compute_their_own() -> None:
    layers = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)]
    before = [layer.forward for layer in layers]
    put_in_place(layers, lambda x: [forward(x) for forward in before], [3, 2])
    a, b = torch.randn(2, 4), torch.randn(2, 4)
    assert torch.equal(layers[0](a), before[0](a)) and torch.equal(layers[1](b), before[1](b))
    assert torch.equal(layers[1](a), before[1](a)) and torch.equal(layers[0](b), before[0](b))
