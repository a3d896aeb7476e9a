"""What a program trains is served as it is at the moment, in its dtype, and every answer says by which version it was made."""

from collections.abc import Callable
from copy import deepcopy
from queue import SimpleQueue
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis
from symbiosis.errors import AdapterError
from symbiosis.serving import Engine
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.gpu_staging import Fetcher
from symbiosis.serving.lora.registry import AdapterRegistry
from symbiosis.serving.lora.target_layers import TargetLayers
from symbiosis.serving.request import Output, Request, Sampling
from symbiosis.serving.runner.dense_runner import make_ready
from symbiosis.serving.runner.shared_inputs import find_groups
from tests.adapters import Configure, off, run, sequence_of

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = [5, 9, 33, 7, 61, 12]
MEMORY = 1 << 24

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def llama(hidden: int = 64, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=112,
        initializer_range=0.1, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(dtype)


def trained(config: peft.PeftConfig, base: nn.Module | None = None) -> Any:
    """A PEFT model whose adapter does something."""
    model = peft.get_peft_model(llama() if base is None else base, config)
    change(model)
    return model.eval()


@torch.no_grad()
def change(model: nn.Module) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += torch.randn_like(parameter) * 0.2


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ALL, "task_type": "CAUSAL_LM", **options})


def greedy(model: Any, count: int = 12) -> list[int]:
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)[
            0, len(PROMPT) :
        ].tolist()


def answer(engine: Engine, count: int = 12) -> Any:
    return engine.generate(PROMPT, adapter="mine", max_tokens=count, temperature=0.0)


KINDS: dict[str, Configure] = {
    "LoRA": lora,
    "of two ranks": lambda: lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 32}),
    "rsLoRA": lambda: lora(use_rslora=True, lora_alpha=3),
    "DoRA": lambda: lora(use_dora=True),
    "modules_to_save": lambda: lora(modules_to_save=["lm_head"]),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": lambda: peft.VeraConfig(r=8, target_modules=["q_proj"]),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_is_served_as_it_is_now(kind: str) -> None:
    model = trained(KINDS[kind]())
    with Engine(llama(), memory=MEMORY) as engine:
        versions = []
        for _ in range(2):
            versions.append(engine.publish("mine", model))
            said = answer(engine)
            assert (list(said.tokens), said.model_version) == (greedy(model), versions[-1])
            change(model)
        assert versions[0] < versions[1]
        assert list(answer(engine).tokens) != greedy(model), "it was changed since, and not published"
        assert engine.generate(PROMPT, max_tokens=1).model_version == 0


def test_a_lora_is_copied_from_where_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.serving.lora.registry.weights_of", None)
    model = trained(lora())
    with Engine(llama(), memory=MEMORY) as engine:
        engine.publish("mine", model)
        assert list(answer(engine).tokens) == greedy(model)
        for layer in model.base_model.model.modules():
            if isinstance(layer, peft.tuners.lora.Linear):  # other parameters in the place of those it knew
                layer.lora_B["default"].weight = nn.Parameter(layer.lora_B["default"].weight.detach() * -2)
        engine.publish("mine", model)
        assert list(answer(engine).tokens) == greedy(model)
        figures = engine.figures()
        assert figures.pages_free + figures.pages_cached == figures.pages, "it takes no pages"


def test_requests_under_way_keep_their_version() -> None:
    model = trained(lora())
    with Engine(llama(), memory=MEMORY) as engine:
        first, expected = engine.publish("mine", model), greedy(model, 60)
        outputs = SimpleQueue[Output]()
        engine.submit(
            Request(id=1, prompt=tuple(PROMPT), adapter="mine", sampling=Sampling(max_tokens=60, temperature=0.0)),
            outputs.put,
        )
        told = [outputs.get(timeout=60)]
        change(model)
        second = engine.publish("mine", model)
        assert answer(engine).model_version == second
        while told[-1].finish is None:
            told.append(outputs.get(timeout=60))
        assert [token.id for each in told for token in each.tokens] == expected
        assert {each.model_version for each in told} == {first}


def test_a_run_is_published_after_the_commands_before() -> None:
    model = llama()
    with symbiosis.training.Engine(model) as trainer, Engine(deepcopy(model), memory=MEMORY) as engine:
        run = trainer.create(lora(), seed=0)
        ids = torch.tensor([PROMPT])
        for _ in range(3):
            run.forward_backward({"input_ids": ids, "labels": ids})
            run.step(lr=0.1)
        version = symbiosis.publish(run, "mine", engine)
        assert run.steps == 3
        found = run.forward({"input_ids": ids, "labels": ids}).result().logprobs[0]
        outputs = SimpleQueue[Output]()
        engine.submit(
            Request(id=1, prompt=tuple(PROMPT), adapter="mine", prompt_logprobs=0, sampling=Sampling(logprobs=0)),
            outputs.put,
        )
        told = outputs.get(timeout=60)
        mine = torch.tensor([token.logprob for token in told.prompt_logprobs[1:]])
        assert told.model_version == version
        assert off(mine, found[: len(mine)]) < 1e-5


def served_logits(base: nn.Module, model: Any) -> Tensor:
    served = make_ready(base, MEMORY)
    library, cache = AdapterRegistry(served), AdapterCache(served.arena)
    TargetLayers(served, cache)
    adapter = library.publish("mine", model)
    assert cache.fetch(adapter)
    return run(served, [(sequence_of(PROMPT, adapter), len(PROMPT)), (sequence_of(PROMPT[:2]), 2)])[0]


def test_it_is_multiplied_in_the_dtype_in_which_it_is_trained() -> None:
    """A float32 adapter on a bfloat16 model: as PEFT does, and not rounded first."""
    model = trained(lora(), llama(dtype=torch.bfloat16))
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        alone = model(torch.tensor([PROMPT])).logits[0, -1].float()
    mine = served_logits(llama(dtype=torch.bfloat16), model)
    assert torch.equal(mine, alone)
    rounded = deepcopy(model)
    for parameter in rounded.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    assert not torch.equal(served_logits(llama(dtype=torch.bfloat16), rounded), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_a_gpu_find_it_in_memory_of_its_own(dtype: torch.dtype) -> None:
    base = llama(dtype=dtype)
    served = make_ready(deepcopy(base), MEMORY)
    groups = find_groups(base, lambda: base(input_ids=torch.tensor([PROMPT])), None)
    served.fetcher = Fetcher(served.arena, groups)
    model = trained(lora(lora_alpha=12), base)
    adapter = AdapterRegistry(served).publish("mine", model)
    cache = AdapterCache(served.arena, fetcher=served.fetcher)
    assert cache.fetch(adapter) and cache.is_here(adapter) and served.arena.pool.free == served.arena.pool.total
    book = cache.book(adapter)
    assert book.is_wide == (dtype == torch.bfloat16) and book.held.dtype == torch.float32
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    shrink, expand = (int(book.addresses[groups[0].entry + n]) for n in (0, 1))
    words = book.words.tolist()
    at = (shrink - book.words.data_ptr()) // 8
    assert words[at] == 12 + (1 << 32 if book.is_wide else 0)
    expected = layer.lora_A["default"].weight
    assert torch.equal(rows_at(book.held, words[at + 1 : at + 5], 64), expected)
    at = (expand - book.words.data_ptr()) // 8
    assert torch.equal(rows_at(book.held, words[at + 4 : at + 8], 64), 3 * layer.lora_B["default"].weight.t())


def rows_at(held: Tensor, addresses: list[int], width: int) -> Tensor:
    flat = held.view(-1)
    begins = [(address - flat.data_ptr()) // flat.itemsize for address in addresses]
    return torch.stack([flat[begin : begin + width] for begin in begins])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda model: model.base_model.model.model.layers[1].mlp.up_proj.lora_B["default"].weight.fill_(float("nan")), "diverged"),
        (lambda model: model.base_model.model.model.layers[1].mlp.up_proj.lora_A["default"].weight.fill_(float("inf")), "diverged"),
    ],
)  # fmt: skip
def test_what_has_diverged_replaces_nothing(spoil: Callable[[Any], Any], why: str) -> None:
    model = trained(lora())
    with Engine(llama(), memory=MEMORY) as engine:
        version, expected = engine.publish("mine", model), greedy(model)
        with torch.no_grad():
            spoil(model)
        with pytest.raises(AdapterError, match=f"'mine'.*{why}"):
            engine.publish("mine", model)
        said = answer(engine)
        assert (list(said.tokens), said.model_version) == (expected, version)


def test_an_adapter_of_another_base_is_refused() -> None:
    with Engine(llama(), memory=MEMORY, max_rank=4) as engine:
        with pytest.raises(AdapterError, match="lora_A of .* is 4 x 32, and this base needs 4 x 64"):
            engine.publish("mine", trained(lora(), llama(hidden=32)))
        with pytest.raises(AdapterError, match="its rank is 8"):
            engine.publish("mine", trained(lora(r=8)))
        with pytest.raises(AdapterError, match="has no adapter"):
            engine.publish("mine", llama())
        with pytest.raises(AdapterError, match="an adapter cannot be named 'None'"):
            engine.publish(None, trained(lora()))  # type: ignore[arg-type]
