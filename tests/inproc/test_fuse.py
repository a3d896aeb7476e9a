"""`fuse`: an ordinary PEFT program with the losses and gradients that it had, whatever the model, the adapter and who computes the base."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.executor.model.load import DEMO_MODEL
from symbiosis.training import logit_pieces
from symbiosis.training.fused.lazy_logits import LazyLogits
from symbiosis.training.fused.lora_group import LoraForward
from symbiosis.training.fused.module_forward import ModuleForward
from tests.conftest import tiny_gpt2, tiny_llama

NEAR = 1e-5  # of the largest gradient: float32's rounding in sums of another order
TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "max_position_embeddings": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
}  # fmt: skip
FAMILIES = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["q_proj", "v_proj", "gate_proj", "up_proj"],
    "gemma2": "all-linear",
    "gpt2": ["c_attn", "c_fc"],
    "phi3": "all-linear",
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt_oss": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "cohere": ["q_proj", "v_proj"],
    "granite": "all-linear",
}


def build(family: str) -> nn.Module:
    if family == "gpt2":
        return tiny_gpt2()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY)).eval()


def lora(**options: Any) -> LoraConfig:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(
        **{"r": 4, "target_modules": targets, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options}
    )


def adapted(model: nn.Module, **options: Any) -> PeftModel:
    torch.manual_seed(1)
    return get_peft_model(model, lora(**options)).train()  # type: ignore[arg-type]


def batch(vocabulary: int = 90) -> dict[str, Tensor]:
    ids = torch.randint(3, vocabulary, (2, 11), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: nn.Module, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(**{**batch(), **more}).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_before(
    model: nn.Module, change: Callable[[nn.Module], Any] = symbiosis.fuse, near: float = NEAR, **more: Any
) -> None:
    expected_loss, expected = step(model, **more)
    change(model)
    loss, found = step(model, **more)
    assert found.keys() == expected.keys() and expected
    assert abs(loss - expected_loss) <= near * abs(expected_loss)
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, each in expected.items():
        assert float((found[name] - each).abs().max()) <= near * largest, name


def forwards(model: nn.Module) -> list[ModuleForward]:
    return [
        vars(module)["forward"] for module in model.modules() if isinstance(vars(module).get("forward"), ModuleForward)
    ]


def groups(model: nn.Module) -> list[int]:
    found = {id(each.group): len(each.group.layers) for each in forwards(model) if isinstance(each, LoraForward)}
    return sorted(found.values())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of five rows, so that there are several."""
    monkeypatch.setattr(logit_pieces, "LOGITS_BYTES", 4 * 96 * 5)
    yield


@pytest.fixture
def no_head_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("whole logits were made")

    monkeypatch.setattr(LazyLogits, "value", refuse)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_of_families(family: str, no_head_over_all_rows: None) -> None:
    model = adapted(build(family), target_modules=FAMILIES[family])
    assert_as_before(model)
    assert max(groups(model)) == {"llama": 3, "mixtral": 3, "gpt_oss": 3, "gemma2": 3, "granite": 3}.get(
        family, 2 if family != "gpt2" and family != "phi3" else 1
    )


@pytest.mark.parametrize("shared", [True, False], ids=["mapped", "called"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_over_an_executor(family: str, shared: bool) -> None:
    with symbiosis.Executor(build(family)) as executor:
        model = symbiosis.wrap(build(family), executor.endpoint, share=shared)
        assert_as_before(adapted(model, target_modules=FAMILIES[family]))


def test_wrap_may_come_after_fuse() -> None:
    model = adapted(tiny_llama())
    with symbiosis.Executor(tiny_llama()) as executor:
        assert_as_before(symbiosis.fuse(model), lambda one: symbiosis.wrap(one, executor.endpoint))


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"lora_dropout": 0.3},
        {"use_dora": True},
        {"lora_bias": False, "bias": "all"},
        {"rank_pattern": {"k_proj": 3}, "alpha_pattern": {"v_proj": 5}},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["norm"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=str,
)
def test_adapters_of_other_kinds(options: dict[str, Any]) -> None:
    assert_as_before(adapted(tiny_llama(), **options))


@pytest.mark.parametrize("more", [{"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(5)}, {"shift_labels": batch()["labels"].roll(-1, 1)}, {"return_dict": True, "output_hidden_states": True}, {"logits_to_keep": 11}], ids=lambda more: next(iter(more)))  # fmt: skip
def test_what_a_loss_is_told(more: dict[str, Any], no_head_over_all_rows: None) -> None:
    assert_as_before(adapted(tiny_llama()), **more)


def test_states_of_an_adapter() -> None:
    """Whatever PEFT does meanwhile, a fused model computes what an unfused one does."""
    model = symbiosis.fuse(adapted(tiny_llama()))
    model.add_adapter("other", lora(r=3))

    def same() -> None:
        assert_as_before(model, symbiosis.unfuse)
        symbiosis.fuse(model)

    model.set_adapter("other")
    same()
    model.base_model.set_adapter(["default", "other"])
    same()
    model.set_adapter("default")
    model.merge_adapter()
    plain = model(**batch()).loss.detach()
    model.unmerge_adapter()
    assert abs(model(**batch()).loss.detach() - plain) <= 1e-5 * abs(plain)
    with model.disable_adapter():
        base = model(**batch()).loss.detach()
    assert abs(base - plain) > 1e-3
    model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3.0)
    assert_as_before(model, symbiosis.unfuse)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_activations(reentrant: bool) -> None:
    model = adapted(tiny_llama())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_as_before(model, use_cache=False)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
)
def test_bfloat16(dtype: torch.dtype, autocast: bool) -> None:
    """Products are made in the rows' dtype, and gradients in that of the parameters: no farther from float32's than PEFT's own."""
    off = [0.0, 0.0]
    for seed in range(6):
        base = tiny_llama()
        torch.manual_seed(seed)
        for parameter in base.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.03)
        model = adapted(base.to(dtype))
        _, exact = step(copy.deepcopy(model).float())
        length = sum(float(each.norm()) ** 2 for each in exact.values()) ** 0.5
        for way, change in enumerate((symbiosis.unfuse, symbiosis.fuse)):
            change(model)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                _, found = step(model)
            off[way] += sum(float((found[name] - each).norm()) ** 2 for name, each in exact.items()) ** 0.5 / length
    assert off[1] <= 1.3 * off[0]
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_gradients_add_up_and_hooks_see_them() -> None:
    model = symbiosis.fuse(adapted(tiny_llama()))
    _, once = step(model)
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    model(**batch()).loss.backward()
    assert sorted(seen) == sorted(once)
    assert all(
        torch.allclose(p.grad, 2 * once[name], rtol=1e-4, atol=1e-6)
        for name, p in model.named_parameters()
        if name in once
    )


def test_names_and_files_stay(tmp_path: Path) -> None:
    model = adapted(tiny_llama())
    names, first = list(model.state_dict()), [id(p) for p in model.parameters()]
    symbiosis.fuse(model)
    assert list(model.state_dict()) == names and [id(p) for p in model.parameters()] == first
    model.save_pretrained(tmp_path)
    again = symbiosis.fuse(PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=True).train())
    assert torch.equal(step(again)[0], step(model)[0])


def test_copies_compute_by_themselves() -> None:
    model = symbiosis.fuse(adapted(tiny_llama()))
    loss, expected = step(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(forwards(made)) == len(forwards(model)) and not {*forwards(made)} & {*forwards(model)}
        found = step(made)
        assert torch.equal(found[0], loss) and all(torch.equal(found[1][name], each) for name, each in expected.items())
    merged = copy.deepcopy(model).merge_and_unload()
    assert abs(merged(**batch()).loss - loss) <= 1e-5 * loss


@pytest.mark.parametrize("how", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_data_parallel(how: dict[str, bool], tmp_path: Path) -> None:
    """Hooks of DistributedDataParallel see each gradient once, and outputs pass through it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = adapted(tiny_llama())
        _, expected = step(model)
        parallel = nn.parallel.DistributedDataParallel(symbiosis.fuse(model), **how)
        for _ in range(2):
            _, found = step(parallel)
        assert {name.removeprefix("module."): None for name in found}.keys() == expected.keys()
        assert all(
            torch.allclose(found[f"module.{name}"], each, rtol=1e-4, atol=1e-6) for name, each in expected.items()
        )
    finally:
        torch.distributed.destroy_process_group()


def test_unfuse_gives_the_bits_back() -> None:
    model = adapted(tiny_llama())
    loss, expected = step(model)
    symbiosis.unfuse(symbiosis.fuse(model))
    again, found = step(model)
    assert not forwards(model) and torch.equal(again, loss)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_generate_and_evaluation() -> None:
    model = adapted(build("gemma2"), target_modules="all-linear").eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        expected, texts = model(**batch()), model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    symbiosis.fuse(model)
    with torch.no_grad():
        found = model(**batch())
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=5, do_sample=False), texts)
    assert abs(found.loss - expected.loss) <= NEAR * expected.loss
    with torch.inference_mode():
        assert abs(model(**batch()).loss - expected.loss) <= NEAR * expected.loss


def test_a_compiled_model_is_the_modules_own() -> None:
    model = adapted(tiny_llama())
    compiled = torch.compile(symbiosis.fuse(model), backend="eager")
    loss, _ = step(model)
    assert abs(compiled(**batch()).loss - loss) <= NEAR * loss


def test_logits_are_there_for_whom_asks() -> None:
    model = adapted(build("gemma2"), target_modules="all-linear")
    expected = model(**batch()).logits
    symbiosis.fuse(model)
    logits = model(**batch()).logits
    assert isinstance(logits, LazyLogits) and not logits.whole.exists
    assert (logits.shape, logits.dtype, logits.device, logits.requires_grad) == (
        expected.shape,
        expected.dtype,
        expected.device,
        True,
    )
    shifted = logits[..., :-1, :].contiguous().float()
    assert isinstance(shifted, LazyLogits) and shifted.shape == (2, 10, 96) and not logits.whole.exists
    assert torch.equal(shifted.argmax(-1), expected[..., :-1, :].argmax(-1)) and logits.whole.exists
    assert torch.allclose(logits.detach().cpu(), expected, atol=1e-5)
    assert torch.allclose(logits[0, 1, :7], expected[0, 1, :7], atol=1e-5)
    own = model(**batch()).logits.log_softmax(-1)[..., 5].sum()
    own.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert torch.allclose(pickle.loads(pickle.dumps(model(**batch()).logits.detach())), expected, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_of_ones_own(reduction: str) -> None:
    """Who takes logits and labels and computes the cross entropy gets it in pieces, or of whole logits, whatever it asks for."""
    model = adapted(tiny_llama())
    labels = batch()["labels"][:, 1:].reshape(-1)
    found = []
    for change in (symbiosis.unfuse, symbiosis.fuse):
        change(model)
        model.zero_grad()
        logits = model(**batch()).logits[:, :-1].reshape(-1, 100)
        loss = F.cross_entropy(logits, labels, reduction=reduction)
        (loss * torch.linspace(1, 2, loss.numel()).view(loss.shape)).sum().backward()
        smooth = F.cross_entropy(logits, labels, label_smoothing=0.1)
        found.append(
            (loss.detach(), smooth.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
        )
    (loss, smooth, gradients), (mine, my_smooth, my_gradients) = found
    assert torch.allclose(mine, loss, rtol=1e-5) and torch.allclose(my_smooth, smooth, rtol=1e-5)
    largest = max(float(each.abs().max()) for each in gradients)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5 * largest) for a, b in zip(my_gradients, gradients, strict=True))


def test_a_head_that_is_looked_at_makes_whole_logits() -> None:
    model = symbiosis.fuse(adapted(tiny_llama()))
    loss = model(**batch()).loss
    seen: list[Tensor] = []
    model.base_model.model.lm_head.register_forward_hook(lambda _, given, y: seen.append(y))
    assert torch.allclose(model(**batch()).loss, loss, rtol=1e-5)
    assert len(seen) == 1 and type(seen[0]) is Tensor


def test_a_norm_of_its_own_kind_is_left_alone() -> None:
    class ShiftedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(64), requires_grad=False), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + 0.01

    model = adapted(tiny_llama())
    model.base_model.model.model.norm = ShiftedRMSNorm()
    assert_as_before(model)
    assert "forward" not in vars(model.base_model.model.model.norm)


def test_a_part_that_computes_anything_else_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = LoraForward.__call__
    monkeypatch.setattr(LoraForward, "__call__", lambda self, x, *args, **kwargs: 1.1 * right(self, x, *args, **kwargs))
    assert not groups(symbiosis.fuse(adapted(tiny_llama())))
    assert "other results" in caplog.text


def test_models_without_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="get_peft_model"):
        symbiosis.fuse(tiny_llama().requires_grad_(False))
    with pytest.raises(ConfigError, match="fuse takes a causal language model of transformers, and Linear is none"):
        symbiosis.fuse(torch.nn.Linear(2, 2))


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 90, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}


def trained(folder: Path, fused: bool, steps: int, resume: bool = False, **options: Any) -> tuple[PeftModel, Trainer]:
    model = adapted(tiny_llama())
    if fused:
        symbiosis.fuse(model)
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps, save_steps=1, learning_rate=1e-3, lr_scheduler_type="constant",
        report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"gradient_checkpointing": True}], ids=str)
def test_trainer_as_before(options: dict[str, Any], tmp_path: Path) -> None:
    model, trainer = trained(tmp_path / "before", False, 3, **options)
    mine, mine_trainer = trained(tmp_path / "fused", True, 3, **options)
    assert float((parameters(mine) - parameters(model)).abs().max()) <= 1e-4
    assert abs(mine_trainer.evaluate()["eval_loss"] - trainer.evaluate()["eval_loss"]) <= 1e-4
    stopped = trained(tmp_path / "resumed", True, 2, **options)[0]
    resumed, _ = trained(tmp_path / "resumed", True, 3, resume=True, **options)
    assert torch.equal(parameters(resumed), parameters(mine)) and not torch.equal(parameters(stopped), parameters(mine))


def test_metrics_of_evaluation_get_logits(tmp_path: Path) -> None:
    model = symbiosis.fuse(adapted(tiny_llama()))
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    made: list[tuple[int, ...]] = []
    trainer = Trainer(
        model, arguments, eval_dataset=Rows(), compute_metrics=lambda given: made.append(given.predictions.shape) or {}
    )
    trainer.evaluate()
    assert made == [(24, 8, 100)]


def test_trl_as_before(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    data = datasets.Dataset.from_dict({"text": [f"The number after {n} is {n + 1}." for n in range(12)]})
    made = []
    for change in (symbiosis.unfuse, symbiosis.fuse):
        model = change(adapted(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), init_lora_weights=True))
        arguments = trl.SFTConfig(
            str(tmp_path / change.__name__), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[], bf16=False, use_cpu=True,
            disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        log = [row for row in trainer.state.log_history if "loss" in row]
        made.append((parameters(model), [(row["loss"], row["entropy"], row["mean_token_accuracy"]) for row in log]))
    assert float((made[0][0] - made[1][0]).abs().max()) <= 1e-4
    assert torch.allclose(torch.tensor(made[0][1]), torch.tensor(made[1][1]), atol=1e-4)
