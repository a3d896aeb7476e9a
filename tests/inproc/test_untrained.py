"""What would train nothing is refused at its first step, by name; what trains something, or does not train, is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import symbiosis
from symbiosis.errors import WrapError
from tests.conftest import tiny_llama

LORA = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
WHY = r"would train nothing.*get_peft_model.*is_trainable=True"


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


@pytest.fixture(params=["from_executor", "wrap"])
def untrainable(request: pytest.FixtureRequest, serve: Callable) -> nn.Module:
    """Under gradient checkpointing, which lets the input of the model require a gradient."""
    endpoint = serve(tiny_llama()).endpoint
    model = (
        symbiosis.from_executor(endpoint)
        if request.param == "from_executor"
        else symbiosis.wrap(frozen(tiny_llama()), endpoint)
    )
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model.train()


def trainer(model: nn.Module, ids: Tensor, folder: Path) -> Trainer:
    text = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(folder), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    return Trainer(model, arguments, train_dataset=text, eval_dataset=text)


def test_a_trainer_with_nothing_to_train(untrainable: nn.Module, ids: Tensor, tmp_path: Path) -> None:
    run = trainer(untrainable, ids, tmp_path)
    assert run.evaluate()["eval_loss"] > 0
    with pytest.raises(WrapError, match=WHY):
        run.train()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_loop_with_nothing_to_train(untrainable: nn.Module, ids: Tensor, kind: Any) -> None:
    optimizer = kind(untrainable.parameters(), lr=0.1)
    untrainable(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(WrapError, match=WHY):
        optimizer.step()


def test_an_adapter_that_was_loaded_for_inference(serve: Callable, ids: Tensor, tmp_path: Path) -> None:
    endpoint = serve(tiny_llama()).endpoint
    get_peft_model(symbiosis.from_executor(endpoint), LORA).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(symbiosis.from_executor(endpoint), tmp_path)
    model.enable_input_require_grads()
    with pytest.raises(WrapError, match=WHY):
        trainer(model, ids, tmp_path).train()
    own = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    with pytest.raises(WrapError, match=WHY):
        torch.optim.AdamW(own).step()


@pytest.mark.parametrize("config", [LORA, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)])
def test_what_trains_is_not_bothered(config: Any, serve: Callable, ids: Tensor, tmp_path: Path) -> None:
    model = get_peft_model(symbiosis.from_executor(serve(tiny_llama()).endpoint), config)
    assert trainer(model, ids, tmp_path).train().training_loss > 0


def test_what_is_none_of_ours_is_not_bothered(untrainable: nn.Module, ids: Tensor) -> None:
    """Another model, a prompt that a frozen model is shown, and one model that is frozen while another is trained."""
    other = nn.Linear(2, 2).requires_grad_(False)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    prompt = nn.Parameter(torch.randn(1, 4, untrainable.config.hidden_size))
    optimizer = torch.optim.SGD([prompt, *untrainable.parameters()], lr=0.1)
    untrainable(inputs_embeds=prompt).logits.sum().backward()
    optimizer.step()
    with torch.no_grad():
        untrainable.eval().generate(ids, max_new_tokens=2)


def test_a_loss_without_a_gradient_is_explained_before_torch_refuses_it(
    serve: Callable, ids: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = symbiosis.from_executor(serve(tiny_llama()).endpoint)
    model(input_ids=ids, labels=ids)  # not in training
    run = trainer(model, ids, tmp_path)
    run.evaluate()
    assert "get_peft_model" not in caplog.text
    with pytest.raises(RuntimeError, match="does not require grad"):
        run.train()
    assert caplog.text.count("backward() will fail: the executor holds") == 1
    assert "is_trainable=True" in caplog.text
    caplog.clear()
    with_adapter = get_peft_model(symbiosis.from_executor(serve(tiny_llama()).endpoint), LORA).train()
    with_adapter(input_ids=ids, labels=ids).loss.backward()
    assert not caplog.records
