"""An adapter acts on its own rows or is refused: at routed experts, at layers that reorder rows, and from one step to the next."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, TaskType
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from symbiosis.errors import AdapterError
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.registry import AdapterRegistry
from symbiosis.serving.lora.target_layers import TargetLayers
from symbiosis.serving.lora.trial import misplaced
from symbiosis.serving.runner.dense_runner import make_ready
from symbiosis.serving.runner.model_runner import ModelRunner
from tests.adapters import off, run, saved, sequence_of

TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
PROMPT = [5, 6, 7, 8, 9]
MEMORY = 1 << 22
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's


class Routed(nn.Module):
    """Each token goes to the likelier of two experts, which gets no other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 2)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        chosen, made = self.gate(rows).argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if len(mine := (chosen == number).nonzero().flatten()):
                made[mine] = expert(rows[mine])
        return made.view(x.shape)


class Sorted(nn.Module):
    """All rows, grouped by what they are like."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        order = rows[:, 0].argsort()
        return torch.empty_like(rows).index_copy_(0, order, self.inner(rows[order])).view(x.shape)


class Twice(nn.Module):
    """Every row two times, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.inner(torch.cat((x, x), dim=1))
        return both[:, : x.shape[1]]


def llama(mlp: type[nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    if mlp is not None:
        model.model.layers[1].mlp = mlp()
    return model


def lora(*targets: str, **options: Any) -> LoraConfig:
    return LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=list(targets), **options)


WRONG: dict[str, tuple[type[nn.Module], str, str]] = {
    "a routed expert": (Routed, "experts.0", "as a routed expert"),
    "grouped rows": (Sorted, "inner", "in another order"),
    "doubled rows": (Twice, "inner", "sees other rows than there are tokens"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dora", [False, True])
def test_a_layer_that_sees_other_rows(name: str, dora: bool, tmp_path: Path) -> None:
    mlp, target, reason = WRONG[name]
    folder, _ = saved(llama(mlp), lora("q_proj", target, use_dora=dora), tmp_path)
    with pytest.raises(AdapterError, match=rf"it adapts model.layers.1.mlp.{target}, which .*{reason}"):
        AdapterRegistry(make_ready(llama(mlp), MEMORY)).add("mine", folder)


def test_a_method_that_peft_computes(tmp_path: Path) -> None:
    config = peft.OFTConfig(task_type=TaskType.CAUSAL_LM, oft_block_size=8, target_modules=["experts.0"])
    folder, _ = saved(llama(Routed), config, tmp_path)
    with pytest.raises(AdapterError, match="as a routed expert"):
        AdapterRegistry(make_ready(llama(Routed), MEMORY)).add("mine", folder)


def test_a_norm_of_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=8)).eval()
    folder, _ = saved(model, peft.LNTuningConfig(task_type=TaskType.CAUSAL_LM, target_modules=["q_norm"]), tmp_path)
    with pytest.raises(AdapterError, match="q_norm, which is not called with one row for each token"):
        AdapterRegistry(make_ready(model, MEMORY)).add("mine", folder)


def test_all_else_of_such_a_model_is_served(tmp_path: Path) -> None:
    folder, alone = saved(llama(Routed), lora("q_proj", "o_proj", "gate"), tmp_path)
    served, library, _ = serving(llama(Routed))
    adapter = library.add("mine", folder)
    with torch.no_grad():
        expected = alone(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    assert off(run(served, [(sequence_of(PROMPT, adapter), 5), (sequence_of(PROMPT), 5)])[0], expected) < 1e-5


def test_a_plain_model_has_no_such_layers() -> None:
    wrong = misplaced(make_ready(llama(), MEMORY))
    linears = [name for name, module in llama().named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    assert len(linears) == 16 and not wrong.keys() & set(linears)


def test_other_rows_in_a_step_end_it(tmp_path: Path) -> None:
    """A layer that was given all rows when it was looked at, and later is not."""
    folder, _ = saved(llama(), lora("q_proj"), tmp_path)
    served, library, _ = serving(llama())
    adapter = library.add("mine", folder)
    q_proj = served.model.get_submodule("model.layers.1.self_attn.q_proj")
    run(served, [(sequence_of(PROMPT, adapter), 5)])
    inputs = torch.randn(1, 3, 32)
    with pytest.raises(AdapterError, match="q_proj was given 3 rows of 5: the adapter 'mine' cannot act there"):
        q_proj(inputs)
    run(served, [(sequence_of(PROMPT), 5)])
    assert torch.equal(q_proj(inputs), nn.functional.linear(inputs, q_proj.weight))  # type: ignore[arg-type]


def test_a_step_without_adapters_behind_one_that_adapts_the_head(tmp_path: Path) -> None:
    folder, _ = saved(llama(), lora("lm_head"), tmp_path)
    served, library, _ = serving(llama())
    adapter = library.add("mine", folder)
    base = deepcopy(run(served, [(sequence_of(PROMPT), 5)]))
    run(served, [(sequence_of(PROMPT, adapter), 5)])
    assert torch.equal(run(served, [(sequence_of(PROMPT), 5)]), base)


class Fetching(AdapterRegistry):
    """What is added is on the device."""

    def __init__(self, served: ModelRunner, residency: AdapterCache) -> None:
        super().__init__(served)
        self._residency = residency

    def add(self, name: str, source: Any) -> Any:
        adapter = super().add(name, source)
        assert self._residency.fetch(adapter)
        return adapter


def serving(model: nn.Module) -> tuple[ModelRunner, AdapterRegistry, TargetLayers]:
    served = make_ready(model, MEMORY)
    residency = AdapterCache(served.arena)
    sites = TargetLayers(served, residency)
    return served, Fetching(served, residency), sites
