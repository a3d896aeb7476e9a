"""Layers that a client makes its own: trained, saved and loaded as in the unsplit model where reads are allowed, refused where not."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import symbiosis
from symbiosis.client.weights.remote_weight import RemoteWeight, remote_weights
from symbiosis.errors import WeightWrite
from tests.conftest import MODELS

LAYER = "model.layers.1.mlp.up_proj"
SAVED = LoraConfig(
    task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], modules_to_save=["o_proj"], init_lora_weights=False
)
LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)


@pytest.fixture
def split(llama: nn.Module, serve: Callable) -> nn.Module:
    return symbiosis.wrap(copy.deepcopy(llama), serve(llama, allow_read=True).endpoint)


@pytest.fixture
def denied(llama: nn.Module, serve: Callable) -> nn.Module:
    return symbiosis.wrap(copy.deepcopy(llama), serve(llama, share_weights=False).endpoint)


def adapted(model: nn.Module, config: LoraConfig) -> nn.Module:
    torch.manual_seed(3)
    return get_peft_model(model, copy.deepcopy(config))


def steps(model: nn.Module, ids: Tensor, optimizer: Any = None, count: int = 3) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    torch.manual_seed(5)
    for _ in range(count):
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(got[name], expected[name])]


@pytest.mark.parametrize("order", ["W>P", "P>W"])
def test_saved_modules_are_trained_and_saved(
    llama: nn.Module, serve: Callable, ids: Tensor, tmp_path: Path, order: str
) -> None:
    endpoint = serve(llama, allow_read=True).endpoint
    unsplit = adapted(copy.deepcopy(llama), SAVED)
    if order == "W>P":
        model = adapted(symbiosis.wrap(copy.deepcopy(llama), endpoint), SAVED)
    else:
        model = symbiosis.wrap(adapted(copy.deepcopy(llama), SAVED), endpoint)
    assert model.get_nb_trainable_parameters() == unsplit.get_nb_trainable_parameters()
    assert model.num_parameters() == unsplit.num_parameters()
    assert steps(model, ids) == steps(unsplit, ids)
    assert_same(model.state_dict(), unsplit.state_dict())
    model.save_pretrained(tmp_path / "split"), unsplit.save_pretrained(tmp_path / "unsplit")
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("split", "unsplit")]
    assert_same(*files)
    loaded = PeftModel.from_pretrained(symbiosis.wrap(copy.deepcopy(llama), endpoint), tmp_path / "split")
    assert torch.equal(logits(loaded, ids), logits(unsplit, ids))


def test_saved_modules_of_a_served_layer_are_refused_without_reads(denied: nn.Module) -> None:
    with pytest.raises(WeightWrite, match=r"o_proj.* cannot require grad .*layers=\"!model\.layers.*allow-read"):
        adapted(denied, SAVED)


def test_a_few_layers_are_trained_whole(split: nn.Module, llama: nn.Module, ids: Tensor) -> None:
    """The parameter itself becomes the client's: an optimizer that knew it before trains it."""
    optimizers = []
    for model in (split, llama):
        model.requires_grad_(False)
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-2))
        parameter = model.get_submodule(LAYER).weight
        assert parameter.requires_grad_(True) is parameter is model.get_submodule(LAYER).weight
    assert steps(split, ids, optimizers[0]) == steps(llama, ids, optimizers[1])
    assert_same(split.state_dict(), llama.state_dict())
    assert sum(1 for _ in remote_weights(split)) == 13
    twin = copy.deepcopy(split)
    assert torch.equal(logits(twin, ids), logits(llama, ids)) and twin.get_submodule(LAYER).weight.requires_grad


@pytest.mark.parametrize("build", MODELS)
def test_full_fine_tuning(build: str, serve: Callable, ids: Tensor) -> None:
    model = MODELS[build]()
    split = symbiosis.from_executor(serve(model, allow_read=True).endpoint)
    for one in (split, model):
        one.requires_grad_(True)
    assert steps(split, ids) == steps(model, ids)
    assert_same(split.state_dict(), model.state_dict())


def test_a_new_parameter_of_a_served_weight(split: nn.Module, llama: nn.Module, ids: Tensor) -> None:
    for model in (split, llama):
        layer = model.get_submodule(LAYER)
        layer.weight = nn.Parameter(layer.weight.detach())
    assert steps(split, ids)[0] == steps(llama, ids)[0] and split.get_submodule(LAYER).weight.grad is None
    assert type(split.get_submodule(LAYER).weight) is nn.Parameter


def ignored_by_ddp(model: nn.Module, ids: Tensor) -> set[str]:
    """Train with DDP, which is gone before its group: who drops a group last waits for its threads, and DDP does so with Python's lock held."""
    ddp = DistributedDataParallel(model)
    ddp(input_ids=ids, labels=ids).loss.backward()
    return ddp.parameters_to_ignore & {name for name, _ in model.named_parameters()}


def test_ddp_broadcasts_what_is_the_clients(split: nn.Module, tmp_path: Path, ids: Tensor) -> None:
    model = adapted(split, SAVED)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ignored = ignored_by_ddp(model, ids)
    finally:
        torch.distributed.destroy_process_group()
    assert ignored == {name for name, p in model.named_parameters() if isinstance(p, RemoteWeight)}


MERGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "merge_and_unload, safe": lambda model: model.merge_and_unload(safe_merge=True),
    "merge_adapter": lambda model: model.merge_adapter() or model,
    "unmerge_adapter": lambda model: model.merge_adapter() or model.unmerge_adapter() or model,
    "unload": lambda model: model.unload(),
}


@pytest.mark.parametrize("merge", MERGES)
def test_state_dicts_are_complete_after_merging(
    merge: str, split: nn.Module, llama: nn.Module, ids: Tensor, tmp_path: Path
) -> None:
    got, expected = (MERGES[merge](adapted(model, LORA)) for model in (split, llama))
    assert_same(got.state_dict(), expected.state_dict())
    if "unload" in merge:
        got.save_pretrained(tmp_path)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), logits(expected, ids))
        assert torch.equal(logits(symbiosis.unwrap(got), ids), logits(expected, ids))


@pytest.mark.called
@pytest.mark.parametrize("build", MODELS)
def test_a_whole_checkpoint_is_saved(build: str, serve: Callable, ids: Tensor, tmp_path: Path) -> None:
    model = MODELS[build]()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, allow_read=True).endpoint)
    split.save_pretrained(tmp_path / "split"), model.save_pretrained(tmp_path / "unsplit")
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("split", "unsplit")))
    torch.save(split.state_dict(), tmp_path / "state.pt")
    assert_same(torch.load(tmp_path / "state.pt"), model.state_dict())
    split.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert symbiosis.stats(split).calls > 0 and all(w.handle.private is None for w in remote_weights(split))


def test_an_adapter_is_saved_without_reading_the_base(split: nn.Module, tmp_path: Path) -> None:
    model = adapted(split, LORA)
    model.save_pretrained(tmp_path)
    PeftModel.from_pretrained(model.unload(), tmp_path).load_adapter(tmp_path, "again")
    assert symbiosis.stats(split).by_op.get("READ", 0) == 0


def test_what_was_rewritten_is_saved(denied: nn.Module, split: nn.Module) -> None:
    """A private copy is the client's; the executor's values are not, where they may not be read."""
    with torch.no_grad():
        split.get_submodule(LAYER).weight.fill_(2)
    assert torch.equal(split.state_dict()[f"{LAYER}.weight"], torch.full((96, 64), 2.0))
    assert f"{LAYER}.weight" not in denied.state_dict()


def rows(count: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 100, (count, 9), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[Callable[..., TrainingArguments]]:
    def make(name: str, **changes: Any) -> TrainingArguments:
        words = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
        words |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 2}
        return TrainingArguments(str(tmp_path / name), **{**words, **changes})

    return make


def test_trainer_resumes_and_loads_the_best(
    llama: nn.Module, serve: Callable, arguments: Callable, tmp_path: Path, ids: Tensor
) -> None:
    """Full fine-tuning of a layer, and an adapter with a saved module."""
    endpoint = serve(llama, allow_read=True).endpoint

    def layer(model: nn.Module) -> nn.Module:
        model.requires_grad_(False).get_submodule(LAYER).weight.requires_grad_(True)
        return model

    for prepare in (layer, lambda model: adapted(model, SAVED)):
        results = []
        for name in ("split", "unsplit"):
            model = copy.deepcopy(llama)
            model = prepare(symbiosis.wrap(model, endpoint) if name == "split" else model)
            where = f"{name} {prepare.__name__}"
            how = arguments(where, load_best_model_at_end=True)
            trainer = Trainer(model, how, train_dataset=rows(), eval_dataset=rows(2))
            trainer.train()
            again = copy.deepcopy(llama)
            again = prepare(symbiosis.wrap(again, endpoint) if name == "split" else again)
            resumed = Trainer(again, arguments(where, max_steps=6), train_dataset=rows(), eval_dataset=rows(2))
            resumed.train(resume_from_checkpoint=str(tmp_path / where / "checkpoint-2"))
            results.append((trainer.state.log_history[-2]["eval_loss"], logits(model, ids), logits(again, ids)))
        assert results[0][0] == results[1][0]
        assert all(torch.equal(got, expected) for got, expected in zip(results[0][1:], results[1][1:], strict=True))


def test_models_prepared_for_training(llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    """As QLoRA's recipe does it: casts, gradients of inputs, checkpointing."""
    llama.to(torch.bfloat16)
    split = symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint)
    models = [adapted(prepare_model_for_kbit_training(model), LORA) for model in (split, llama)]
    assert steps(models[0], ids) == steps(models[1], ids)


def test_what_wrap_froze_is_told_once_and_when_it_matters(
    llama: nn.Module, serve: Callable, ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = serve(llama).endpoint
    adapter = adapted(symbiosis.wrap(copy.deepcopy(llama), endpoint), LORA)
    steps(adapter, ids)
    logits(symbiosis.wrap(copy.deepcopy(llama), endpoint), ids)
    assert "frozen" not in caplog.text
    whole = symbiosis.wrap(copy.deepcopy(llama), endpoint)
    steps(copy.deepcopy(whole), ids)
    assert caplog.text.count("14 weights that were trainable before wrap are frozen") == 1
    assert "model.layers.0.self_attn.q_proj" in caplog.text and "layers='!NAME'" in caplog.text
    frozen = symbiosis.wrap(copy.deepcopy(llama).requires_grad_(False), endpoint)
    frozen.lm_head.requires_grad_(True)
    steps(frozen, ids)
    assert caplog.text.count("frozen") == 1


# ---------------------------------------------------------------- what is assigned stays as it lies


def _linear(model: nn.Module) -> nn.Linear:
    return model.model.layers[1].self_attn.q_proj


def _a_slice(model: nn.Module) -> None:
    _linear(model).weight.data = torch.linspace(-1, 1, 2 * 64 * 64)[64 * 64 :].view(64, 64)


def _all_from_one_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 1.1, model.parameters())


def _transposed(model: nn.Module) -> None:
    _linear(model).weight.data = torch.linspace(-1, 1, 64 * 64).view(64, 64).t()


def _transposed_and_written(model: nn.Module) -> None:
    _transposed(model)
    _linear(model).weight[3].mul_(2)
    _linear(model).weight.data[:, 5] = 7


def _transposed_and_cast(model: nn.Module) -> None:
    _transposed(model)
    model.double().float()


def _exchanged(model: nn.Module) -> None:
    first, second = (layer.self_attn.q_proj.weight for layer in model.model.layers)
    first.data, second.data = second.data, first.data


def _what_was_there_is_kept(model: nn.Module) -> None:
    before = _linear(model).weight.data
    _linear(model).weight.data = torch.ones(64, 64)
    _linear(model).weight.data = before * 0.5


ASSIGNED = (
    _a_slice, _all_from_one_vector, _transposed, _transposed_and_written, _transposed_and_cast, _exchanged, _what_was_there_is_kept
)  # fmt: skip


@pytest.mark.parametrize("assign", ASSIGNED)
def test_what_is_assigned_is_what_is_multiplied_by(
    assign: Callable[[nn.Module], None], split: nn.Module, llama: nn.Module, ids: Tensor
) -> None:
    for model in (split, llama):
        with torch.no_grad():
            assign(model)
    got, expected = _linear(split).weight, _linear(llama).weight
    assert torch.equal(got + 0, expected) and got.stride() == expected.stride()
    assert torch.equal(logits(split, ids), logits(llama, ids))
    assert torch.equal(logits(copy.deepcopy(split), ids), logits(llama, ids))


WRITES: dict[str, Callable[[Any, Any], object]] = {
    "add_": lambda to, own: to.add_(own),
    "copy_": lambda to, own: to.copy_(own),
    "lerp_": lambda to, own: to.lerp_(own, 0.25),
    "out=": lambda to, own: torch.mul(own, 2, out=to.data),
    "foreach": lambda to, own: torch._foreach_add_([own, to], [own, own]),
    "rows": lambda to, own: to[2:5].copy_(own[:3]),
    "transposed": lambda to, own: to.data.t().mul_(own.t()),
}


@pytest.mark.parametrize("write", WRITES)
def test_one_layer_is_written_with_what_is_the_clients_own_of_another(
    write: str, split: nn.Module, llama: nn.Module
) -> None:
    """Both are remote weights, and only one has memory here: averages and ties of layers were lost."""
    for model in (split, llama):
        layers = [model.get_submodule(f"model.layers.{number}.mlp.up_proj") for number in (0, 1)]
        with torch.no_grad():
            layers[0].weight.mul_(2)
            WRITES[write](layers[1].weight, layers[0].weight)
    for name in ("model.layers.0.mlp.up_proj", LAYER):
        assert torch.equal(split.get_submodule(name).weight.value(), llama.get_submodule(name).weight)  # type: ignore[operator]


def _written_from_itself(model: nn.Module) -> None:
    _linear(model).weight.mul_(_linear(model).weight)
    torch.add(_linear(model).weight, _linear(model).weight, out=_linear(model).weight.data)


def _two_that_share(model: nn.Module) -> None:
    first, second = (layer.self_attn.q_proj.weight for layer in model.model.layers)
    first.data = second.data
    first.mul_(0.5)
    second[3].zero_()


def _one_is_the_other_transposed(model: nn.Module) -> None:
    first, second = (layer.self_attn.q_proj.weight for layer in model.model.layers)
    first.data = second.data.t()
    second[3].zero_()


@pytest.mark.parametrize("write", [_written_from_itself, _two_that_share, _one_is_the_other_transposed])
def test_what_shares_memory_is_written_to_together(
    write: Callable[[nn.Module], None], split: nn.Module, llama: nn.Module, ids: Tensor
) -> None:
    for model in (split, llama):
        with torch.no_grad():
            write(model)
    for got, expected in zip(split.model.layers, llama.model.layers, strict=True):
        assert torch.equal(got.self_attn.q_proj.weight + 0, expected.self_attn.q_proj.weight)
    assert torch.equal(logits(split, ids), logits(llama, ids))


def test_layers_that_were_exchanged_are_unwrapped(llama: nn.Module, denied: nn.Module, ids: Tensor) -> None:
    """That needs no reads: each is found by what it holds."""
    weights = {name: value.clone() for name, value in llama.state_dict().items()}
    for model in (denied, llama):
        _exchanged(model)
    assert torch.equal(logits(denied, ids), logits(llama, ids))
    assert torch.equal(logits(symbiosis.unwrap(denied, weights), ids), logits(llama, ids))
