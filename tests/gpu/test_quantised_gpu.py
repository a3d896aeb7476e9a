"""Packed weights on a GPU: made whole as on a CPU, and multiplied as the whole matrices of the unsplit model; bit for bit if that is asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis import training
from symbiosis.demo.processes import executor as executor_of
from symbiosis.executor.model.load import load_model
from symbiosis.kernels.packing import FORMATS, pack
from symbiosis.serving import Engine
from tests.conftest import tiny_gpt2, tiny_llama, tiny_mixtral, wide_llama
from tests.inproc.test_quantised import whole_of, with_values
from tests.inproc.test_training import batch, lora
from tests.quantised import WRITERS, write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL = slice(None)
PARTS = [(ALL, ALL), (slice(3, 190), slice(5, 1077)), (slice(191, 192), slice(0, 64))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_is_made_whole_as_on_a_cpu(format: str, dtype: torch.dtype) -> None:
    for shape in ((192, 1088), (3, 64, 1088)):
        packed = pack(torch.randn(shape), format)
        there = packed.with_parts(Tensor.cuda)
        for rows, columns in PARTS:
            assert torch.equal(there.whole(dtype, rows, columns).cpu(), packed.whole(dtype, rows, columns))
        numbers = torch.tensor([[5, 0], [191, 5]])
        assert torch.equal(there.rows(dtype, numbers.cuda()).cpu(), packed.rows(dtype, numbers))


@pytest.mark.parametrize("name", WRITERS)
def test_a_checkpoint_has_the_values_of_its_format(name: str, tmp_path: Path) -> None:
    values = write(tiny_llama().bfloat16(), tmp_path / "model", name)
    loaded = load_model(str(tmp_path / "model"), None, "cuda")
    for key, value in values.items():
        assert torch.equal(loaded.get_parameter(key).whole().cpu(), value.bfloat16()), key  # type: ignore[attr-defined]


def results(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Logits, and the gradients of a LoRA step."""
    torch.manual_seed(3)
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()  # type: ignore[arg-type]
    loss = peft_model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in peft_model.parameters() if p.grad is not None)]


def agree(split: nn.Module, unsplit: nn.Module, ids: Tensor) -> None:
    with torch.no_grad():
        for of in (ids, ids[:1, :1]):
            assert torch.equal(split(of).logits, unsplit(of).logits)
    for got, expected in zip(results(split, ids), results(unsplit, ids), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_mixtral])
def test_split_equals_unsplit(format: str, make: Callable[[], nn.Module], tmp_path: Path, ids: Tensor) -> None:
    make().bfloat16().save_pretrained(tmp_path)  # type: ignore[operator]
    where = f"local://{tmp_path}/executor.sock"
    with symbiosis.Executor(
        str(tmp_path), quantize=format, device="cuda", listen=[where], batch_invariant=True
    ) as executor:
        split: Any = symbiosis.from_executor(executor.endpoint)
        unsplit = whole_of(load_model(str(tmp_path), None, "cuda"), executor)
        assert split.device.type == "cuda"
        if make is tiny_mixtral:  # routed experts are not adapted
            with torch.no_grad():
                assert torch.equal(split(ids.cuda()).logits, unsplit(ids.cuda()).logits)
        else:
            agree(split, unsplit, ids.cuda())
        assert {layer.packed for layer in executor.server.store.served()} == {format}
        assert executor.server.shares_weights


@pytest.mark.parametrize("name", ["fp8 blocks", "nf4 nested", "gptq", "awq"])
def test_a_quantised_checkpoint(name: str, tmp_path: Path, ids: Tensor) -> None:
    values = write(tiny_llama().bfloat16(), tmp_path / "model", name)
    with symbiosis.Executor(str(tmp_path / "model"), device="cuda", batch_invariant=True) as executor:
        split = symbiosis.from_executor(executor.endpoint)
        unsplit = with_values(
            load_model(str(tmp_path / "model"), None, "cuda"), {k: v.cuda() for k, v in values.items()}
        )
        agree(split, unsplit, ids.cuda())


@pytest.mark.parametrize("name", [*WRITERS])
def test_few_rows_are_as_near_as_whole_weights_are(name: str, tmp_path: Path, ids: Tensor) -> None:
    """Their sums are made in another order."""
    values = write(tiny_llama().bfloat16(), tmp_path / "model", name)
    with symbiosis.Executor(str(tmp_path / "model"), device="cuda") as executor:
        split: Any = symbiosis.from_executor(executor.endpoint)
        whole: Any = with_values(
            load_model(str(tmp_path / "model"), None, "cuda"), {k: v.cuda() for k, v in values.items()}
        )
        for of in (ids.cuda(), ids[:1, :1].cuda(), ids.repeat(8, 1).cuda()):
            with torch.no_grad():
                found, expected, exact = split(of).logits, whole(of).logits, whole.float()(of).logits
                whole.bfloat16()
            assert torch.dist(found.float(), exact) < 1.2 * torch.dist(expected.float(), exact) + 1e-6


@pytest.mark.parametrize("format", FORMATS)
def test_a_captured_step(format: str, tmp_path: Path, ids: Tensor) -> None:
    """As often as it is replayed, and beside another client."""
    tiny_llama().bfloat16().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    where = f"local://{tmp_path}/executor.sock"
    how = "--quantize", format, "--device", "cuda", "--listen", where
    with executor_of(tmp_path, str(tmp_path / "model"), *how):
        split, other = symbiosis.from_executor(where), symbiosis.from_executor(where)
        ids = ids.cuda()
        with torch.no_grad():
            expected = split(ids).logits.clone()
            step = symbiosis.capture(lambda ids: split(ids).logits)
            for _ in range(6):
                assert torch.equal(step(ids), expected)
                assert torch.equal(other(ids).logits, expected)


@pytest.mark.parametrize("name", ["fp8 blocks", "nf4 nested", "gptq", "int8 rows"])
def test_mapped_weights_make_tokens_and_calls_train(name: str, tmp_path: Path, ids: Tensor) -> None:
    """By the executor's own kernels, so with its bits; and a program with mapped weights goes on when the executor is gone."""
    write(tiny_llama().bfloat16(), tmp_path / "model", name)
    where, ids = f"local://{tmp_path}/executor.sock", ids.cuda()
    with executor_of(tmp_path, str(tmp_path / "model"), "--device", "cuda", "--listen", where) as executor:
        split, called = symbiosis.from_executor(where), symbiosis.from_executor(where, share=False)
        rows = ids, ids[:1, :1], ids.repeat(8, 1)
        with torch.no_grad():
            expected = [called(of).logits for of in rows]
            for of, logits in zip(rows, expected, strict=True):
                assert torch.equal(split(of).logits, logits)
            step = symbiosis.capture(lambda ids: split(ids).logits)
            for _ in range(5):
                assert torch.equal(step(ids), expected[0])
        products = symbiosis.stats(split).direct
        assert products >= 8 * 7 * 2 and not symbiosis.stats(split).calls and not symbiosis.stats(called).direct
        trained = symbiosis.from_executor(where)
        by_calls = results(symbiosis.from_executor(where, share=False), ids)
        for got, right in zip(results(trained, ids), by_calls, strict=True):
            assert torch.equal(got, right)
        assert set(symbiosis.stats(trained).by_op) == {"FORWARD", "DGRAD"}
        executor.kill()
        with torch.no_grad():
            for of, logits in zip(rows, expected, strict=True):
                assert torch.equal(split(of).logits, logits)
            assert torch.equal(step(ids), expected[0])


def test_programs_hold_no_packed_weights_of_their_own(tmp_path: Path) -> None:
    """Whatever there are of them: the pieces are the executor's."""
    wide_llama().bfloat16().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    where = f"local://{tmp_path}/executor.sock"
    with executor_of(tmp_path, str(tmp_path / "model"), "--quantize", "int8", "--device", "cuda", "--listen", where):
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        split: Any = symbiosis.from_executor(where)
        with torch.no_grad():
            split(torch.zeros(1, 1, dtype=torch.int64, device="cuda"))
        torch.cuda.synchronize()
        packed = sum(
            layer.weight.numel()
            for layer in split.modules()
            if isinstance(layer, nn.Linear) and layer is not split.lm_head
        )
        others = sum(weight.nbytes for weight in (*split.parameters(), *split.buffers()) if not weight.is_meta)
        assert before - torch.cuda.mem_get_info()[0] < others + 0.5 * packed


def test_servers_and_trainers(tmp_path: Path) -> None:
    """Tokens are those of the unsplit model, and a run's step that over an executor of whole weights, up to how its kernels round."""
    demo: Any = load_model("demo").bfloat16()
    demo.save_pretrained(tmp_path)
    where = f"local://{tmp_path}/executor.sock"
    with symbiosis.Executor(str(tmp_path), quantize="nf4", device="cuda", listen=[where]) as executor:
        whole: Any = whole_of(demo.cuda(), executor)
        prompt = list(b"def average(numbers):")
        losses = []
        with symbiosis.Executor(whole, listen=[f"local://{tmp_path}/whole.sock"]) as other:
            texts = []
            for endpoint in (executor.endpoint, other.endpoint):
                with Engine(endpoint, memory=1 << 26) as engine:
                    texts.append(engine.generate(prompt, max_tokens=12, temperature=0.0, ignore_eos=True).tokens)
                with training.Engine(endpoint) as trainer:
                    run = trainer.create(lora(), seed=1)
                    first = run.forward_backward(batch(1)).result(60).loss
                    run.step(1e-2).result(60)
                    for _ in range(4):
                        loss = run.forward_backward(batch(1)).result(60).loss
                        run.step(1e-2).result(60)
                    losses.append(loss)
        assert texts[0] == texts[1]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2) and losses[0] < first
