"""Compiled models on a GPU, with CUDA graphs by the compiler (`mode="reduce-overhead"`): calls stay outside of these graphs.

The compiler adds up norms and softmax in an order of its own, so values are compared with those of the unsplit, uncompiled model to
within a few roundings of float32; tokens are the same.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

import symbiosis
from tests.conftest import tiny_llama
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_line import WAIT_S, line_of, lora, serve_forever, trainer
from tests.gpu.test_gpu_mapped import Served

DEVICE = "cuda"
LAYERS = 14  # that are served: seven in each of two blocks; compiled code makes a call for each
GRADIENTS = 11  # nobody needs those of what the first block's q, k and v get
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # compilers take their time
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    started = Processes()
    _, ready = started.start(serve_forever, f"{tmp_path_factory.mktemp('executor')}/executor.sock")
    yield ready.get(timeout=WAIT_S)
    started.end()


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def check_calls(split: nn.Module, before: int, made: int) -> None:
    """Every call was made by the program itself, whatever the compiler replays."""
    assert symbiosis.stats(split).calls - before == made
    assert line_of(split).recorded == 0


def test_a_compiled_and_captured_step_by_mapped_weights(ids: Tensor, tmp_path: Path) -> None:
    processes = Processes()
    served = Served(processes, tmp_path)
    try:
        losses = []
        for model in (tiny_llama().to(DEVICE), symbiosis.wrap(tiny_llama().to(DEVICE), served.endpoint)):
            adapted = lora(model).train()
            if losses:
                adapted.forward = torch.compile(adapted.forward)  # type: ignore[method-assign]
            run = symbiosis.capture(trainer(adapted))
            losses.append(torch.stack([run(ids).detach().clone() for _ in range(6)]))
        torch.testing.assert_close(*losses, **CLOSE)
        assert symbiosis.stats(model).calls == 0 and symbiosis.stats(model).direct > 0 and len(run._graphs) == 1
    finally:
        processes.end()


def test_decoding_with_a_static_cache(endpoint: str, ids: Tensor) -> None:
    split = symbiosis.wrap(tiny_llama().to(DEVICE), endpoint)

    @torch.no_grad()
    def logits(model: nn.Module, wrap: Callable[[Any], Any], check: Callable[[int], None]) -> list[Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=64)
        made = [model(ids, past_key_values=cache, use_cache=True).logits[:, -1:]]
        step = wrap(model)
        for position in range(ids.shape[1], ids.shape[1] + 8):
            before = symbiosis.stats(split).calls
            torch.compiler.cudagraph_mark_step_begin()
            where = torch.full((2, 1), position, device=DEVICE)
            output = step(made[-1].argmax(-1), past_key_values=cache, use_cache=True, position_ids=where)
            made.append(output.logits.clone())
            check(before)
        return made

    expected = logits(tiny_llama().to(DEVICE), lambda model: model, lambda _: None)
    compiled = logits(
        split,
        lambda model: torch.compile(model, mode="reduce-overhead"),
        lambda before: check_calls(split, before, LAYERS),
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    for one, other in zip(compiled, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
        assert torch.equal(one.argmax(-1), other.argmax(-1))


def test_generation_that_compiles_by_itself(endpoint: str, ids: Tensor) -> None:
    split = symbiosis.wrap(tiny_llama().to(DEVICE), endpoint)
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = tiny_llama().to(DEVICE).generate(ids, **options)
    for _ in range(2):
        assert torch.equal(split.generate(ids, cache_implementation="static", **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert line_of(split).recorded == 0


def test_training(endpoint: str, ids: Tensor) -> None:
    plain, remote = lora(tiny_llama().to(DEVICE)), lora(symbiosis.wrap(tiny_llama().to(DEVICE), endpoint))
    sides = (plain.train(), plain), (torch.compile(remote.train(), mode="reduce-overhead"), remote)
    for turn in range(6):
        batch, before, found = (ids + turn) % 100, symbiosis.stats(remote).calls, []
        for run, model in sides:
            torch.compiler.cudagraph_mark_step_begin()
            loss = run(input_ids=batch, labels=batch).loss
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            found.append((loss.detach().clone(), gradients))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
        assert len(found[0][1]) == len(found[1][1]) == 16
        torch.testing.assert_close(found[1], found[0], **CLOSE)
        check_calls(remote, before, LAYERS + GRADIENTS)
