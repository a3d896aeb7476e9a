"""The engine that trains, on a GPU: as PEFT alone, over its own weights and over those of an executor."""

import threading
import time
from math import hypot
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from symbiosis.training import Engine
from symbiosis.training.packed_model import PackedModel
from tests.conftest import tiny_llama
from tests.gpu.test_gpu_mapped import Served

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options})


CONFIGS = {"LoRA": lora, "dropout": lambda: lora(lora_dropout=0.2), "DoRA": lambda: lora(use_dora=True)}


def batch(seed: int, rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def alone(
    config: LoraConfig, seed: int, given: dict[str, Tensor], dtype: torch.dtype, exact: bool = False
) -> tuple[float, list[Tensor]]:
    """Return the loss and the gradients of PEFT alone, under autocast or, of the same values, computed in float32."""
    model = tiny_llama().to("cuda", dtype)
    torch.manual_seed(seed)
    model = get_peft_model(model, config).train()  # type: ignore[arg-type]
    if exact:
        model.float()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32 and not exact):
        loss = model(**{name: each.cuda() for name, each in given.items()}).loss
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def off(found: list[Tensor], expected: list[Tensor]) -> float:
    largest = max(float(each.abs().max()) for each in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


def far(found: list[Tensor], exact: list[Tensor]) -> float:
    """The length of the difference, relative."""
    differences = [float((a - b).norm()) for a, b in zip(found, exact, strict=True)]
    return hypot(*differences) / hypot(*(float(each.norm()) for each in exact))


@pytest.mark.parametrize("over", ["its own weights", "an executor"])
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=["float32", "bfloat16"]
)
def test_runs_are_as_alone(over: str, dtype: torch.dtype, most: float, processes: Any, tmp_path: Path) -> None:
    if over == "an executor":
        if dtype != torch.float32:
            pytest.skip("the executor of these tests holds float32")
        given: Any = Served(processes, tmp_path).endpoint
    else:
        given = tiny_llama().to("cuda", dtype)
    batches = [batch(number, 1 + number, 7 + number) for number in range(3)]
    with Engine(given) as engine:
        runs = [engine.create(config(), seed=number) for number, config in enumerate(CONFIGS.values())]
        assert all(p.is_cuda for run in runs for p in run.model.parameters() if p.requires_grad)
        results = [run.forward_backward(one) for run, one in zip(runs, batches, strict=True)]
        losses = [each.result(120).loss for each in results]
        found = [[p.grad.clone() for p in run.model.parameters() if p.grad is not None] for run in runs]
        for run in runs:
            assert run.step(1e-3).result(120) > 0
    for number, config in enumerate(CONFIGS.values()):
        if number == 1:
            continue  # a GPU's generator draws by launches: its dropout is another one than alone
        loss, gradients = alone(config(), number, batches[number], dtype)
        assert losses[number] == pytest.approx(loss, rel=most) and off(found[number], gradients) < most


def test_checkpoints_go_on(tmp_path: Path) -> None:
    with Engine(tiny_llama().cuda()) as engine:
        run = engine.create(lora(), seed=1)
        run.forward_backward(batch(1, 2, 9)).result(120)
        run.step(1e-2).result(120)
        loaded = engine.load(run.save(tmp_path / "one"))
        for each in (run, loaded):
            each.forward_backward(batch(2, 2, 9)).result(120)
            each.step(1e-2).result(120)
        pairs = zip(*([p for p in each.model.parameters() if p.requires_grad] for each in (run, loaded)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("config", ["LoRA", "DoRA"])
def test_nobody_waits_for_a_pass(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other threads of the program compute meanwhile, such as tokens. Passes of LoRA are captured, those of DoRA are not."""
    hidden = PackedModel._hidden

    def slow(self: PackedModel, inputs: dict[str, Any]) -> Tensor:
        torch.cuda._sleep(1_500_000_000)  # most of a second
        return hidden(self, inputs)

    with Engine(tiny_llama().cuda()) as engine:
        run = engine.create(CONFIGS[config](), seed=0)
        monkeypatch.setattr(PackedModel, "_hidden", slow)
        for _ in range(4):  # then it is captured
            run.forward_backward(batch(1, 2, 9)).result(120)
        (torch.ones(8).cuda() + 1).cpu()
        asked = run.forward_backward(batch(1, 2, 9))
        time.sleep(0.2)
        began = time.perf_counter()
        found = [(torch.ones(8).cuda() + number).cpu() for number in range(8)]
        took, was_there = time.perf_counter() - began, asked.done()
        asked.result(120)
    assert len(found) == 8 and not was_there and took < 0.2


def test_it_is_where_the_executor_is(processes: Any, tmp_path: Path) -> None:
    with Engine(Served(processes, tmp_path).endpoint) as engine:
        run = engine.create(lora())
        assert next(p for p in run.model.parameters() if p.requires_grad).is_cuda


@pytest.mark.timeout(400)
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_captured_passes_are_as_alone(compiled: bool) -> None:
    """From the third pass of its size on a pass is one graph, whatever runs and lengths are in it. Gradients are no farther from float32's than
    PEFT's own."""
    model = tiny_llama().to("cuda", torch.bfloat16)
    configs = [lora(), lora(r=20, lora_alpha=3, target_modules=["q_proj", "down_proj"]), lora(r=9)]
    mine, theirs = [], []
    with Engine(model, compiled=compiled) as engine:
        for count, lengths in ((1, [(2, 13)]), (3, [(2, 7), (1, 12), (3, 5)]), (2, [(1, 9), (1, 25)])):
            for round in range(4):
                runs = [engine.create(config, seed=number) for number, config in enumerate(configs[:count])]
                batches = [batch(10 * round + number, *shape) for number, shape in enumerate(lengths)]
                go = held(engine)
                results = [run.forward_backward(one) for run, one in zip(runs, batches, strict=True)]
                go.set()
                for number, (run, result) in enumerate(zip(runs, results, strict=True)):
                    _, gradients = alone(configs[number], number, batches[number], torch.bfloat16)
                    loss, exact = alone(configs[number], number, batches[number], torch.bfloat16, exact=True)
                    assert result.result(300).joined == count
                    assert result.result().loss == pytest.approx(loss, rel=3e-2)
                    found = [p.grad.clone() for p in run.model.parameters() if p.grad is not None]
                    mine.append(far(found, exact))
                    theirs.append(far(gradients, exact))
                    assert mine[-1] < 0.1, (count, round, number)  # what no rounding explains
                for run in runs:
                    run.close()
        assert engine._model._captured is not None and engine._model._captured.graphs >= 3
    assert sum(mine) <= 1.3 * sum(theirs)


def held(engine: Engine) -> threading.Event:
    """Have the engine wait, so that what is put meanwhile is computed at once."""
    go, begun = threading.Event(), threading.Event()
    holder = engine.create(lora())

    def wait() -> None:
        begun.set()
        assert go.wait(60)

    holder.when_done(wait)
    assert begun.wait(300)
    return go
