"""On a CUDA device: an executor there, clients there or on the CPU, over every transport, bit for bit."""

import copy
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.demo.processes import executor
from symbiosis.executor.daemon import memory_plan
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.kernels.integers import modular_product, product_by_parts, quantise
from symbiosis.transport.cuda import driver as cuda_driver
from symbiosis.transport.cuda.driver import PinnedMemory
from symbiosis.transport.patience import JOIN_S
from tests.conftest import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Gradients of one LoRA step."""
    torch.manual_seed(3)
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    peft_model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in peft_model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_split_equals_unsplit(name: str, dtype: torch.dtype, serve: Callable, url: str, ids: Tensor) -> None:
    model, ids = MODELS[name]().to("cuda", dtype), ids.cuda()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, listen=[url]).endpoint)
    with torch.no_grad():
        assert torch.equal(split(ids).logits, model(ids).logits)
    if name != "mixtral":
        expected, got = step(model, ids), step(split, ids)
        assert got.keys() == expected.keys()
        for parameter in expected:
            assert torch.equal(got[parameter], expected[parameter]), parameter


def test_the_memory_plan_has_the_gpu_s_memory() -> None:
    plan = memory_plan(Store(MODELS["llama"]().cuda()), Options(device="cuda"))
    total = torch.cuda.mem_get_info()[1]
    assert 0 < plan["gpu_free_mib"] <= total >> 20 and plan["gpu_session_at_least_mib"] == 64
    assert plan["free_mib"] != plan["gpu_free_mib"] and plan["gpu_headroom_mib"] > 0


def test_who_is_told_that_an_executor_is_ready_can_join_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its kernels have yet to be compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none yet"))
    MODELS["llama"]().bfloat16().save_pretrained(tmp_path / "model")
    with executor(tmp_path, str(tmp_path / "model"), "--device=cuda", f"--listen=local://{tmp_path}/a.sock") as started:
        begun = time.monotonic()
        Session(started.endpoints[0]).close()
        assert time.monotonic() - begun < JOIN_S / 4, started.log


def test_without_stream_memory_operations_calls_go_through_the_host(
    serve: Callable, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = cuda_driver._attribute
    monkeypatch.setattr(cuda_driver, "_attribute", lambda what, device: what != 122 and real(what, device))
    model, ids = MODELS["llama"]().cuda(), ids.cuda()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, listen=[f"local://{tmp_path}/executor.sock"]).endpoint)
    with torch.no_grad():
        assert torch.equal(split(ids).logits, model(ids).logits)
    assert "go through the host's memory, which is slow: cuda:0 has no stream memory operations" in caplog.text


def test_client_on_the_cpu_of_a_gpu_executor(serve: Callable, url: str, ids: Tensor) -> None:
    model = MODELS["llama"]()
    split = symbiosis.wrap(copy.deepcopy(model), serve(copy.deepcopy(model).cuda(), listen=[url]).endpoint)
    with torch.no_grad():
        difference = (split(ids).logits - model(ids).logits).abs().max()
    assert difference < 1e-4, "float32 products of two devices differ in rounding only"


def test_what_was_pinned_for_a_refused_line_is_let_go(serve: Callable, ids: Tensor, tmp_path: Path) -> None:
    """An executor in the client's own process refuses; else another's words might later lie where these were."""
    pinned = len(PinnedMemory._mapped)
    executor = serve(MODELS["llama"]().cuda(), listen=[f"local://{tmp_path}/executor.sock"])
    split = symbiosis.wrap(MODELS["llama"]().cuda(), executor.endpoint)
    with torch.no_grad():
        split(ids.cuda())
    session = next(remote_weights(split)).handle.session
    assert not session.lines and symbiosis.stats(split).calls
    session.close()
    executor.close()
    assert len(PinnedMemory._mapped) <= pinned


def test_model_from_a_gpu_executor(serve: Callable, ids: Tensor) -> None:
    model = MODELS["llama"]().cuda()
    built = symbiosis.from_executor(serve(model).endpoint, device="cuda")
    with torch.no_grad():
        assert torch.equal(built(ids.cuda()).logits, model(ids.cuda()).logits)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 64), (17, 100, 36), (33, 4096, 512), (3, 7, 5)], ids=str)
@pytest.mark.parametrize("bits", [8, 16])
def test_integer_products_are_those_of_the_cpu(bits: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    v_KN = torch.randn(inputs, outputs, generator=generator)
    x_TK = torch.randint(0, 256, (rows, inputs * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
    digits, unit = quantise(v_KN, bits)
    on_gpu, unit_there = quantise(v_KN.cuda(), bits)
    assert torch.equal(on_gpu.cpu(), digits) and torch.equal(unit_there.cpu(), unit)
    assert torch.equal(modular_product(x_TK.cuda(), on_gpu).cpu(), modular_product(x_TK, digits))
    dy_TN = x_TK[:, :outputs].contiguous() if outputs <= inputs else x_TK
    back = digits.transpose(1, 2)[:, : dy_TN.shape[1]]
    assert torch.equal(modular_product(dy_TN.cuda(), back.cuda()).cpu(), modular_product(dy_TN, back))


@pytest.mark.parametrize("bits", [8, 16])
def test_weights_are_quantised_as_on_the_cpu(bits: int) -> None:
    """Many columns, as a division that is not IEEE's need not go wrong in the first."""
    v_KN = torch.randn(3, 1 << 16, generator=torch.Generator().manual_seed(0))
    for here, there in zip(quantise(v_KN, bits), quantise(v_KN.cuda(), bits), strict=True):
        assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 32, 65, 2048])
@pytest.mark.parametrize("width", [4096, 11008])
@pytest.mark.parametrize("digits", [1, 2])
def test_large_integer_products(digits: int, width: int, rows: int, dtype: torch.dtype) -> None:
    """Forward and backward, also into memory with gaps."""
    random = torch.Generator("cuda").manual_seed(rows)
    w_DKN = torch.randint(-127, 128, (digits, 4096, width), dtype=torch.int8, device="cuda", generator=random)
    for w in (w_DKN, w_DKN.transpose(1, 2)):
        x = torch.randint(
            0, 256, (rows, w.shape[1] * dtype.itemsize), dtype=torch.uint8, device="cuda", generator=random
        ).view(dtype)
        out = x.new_zeros(rows, w.shape[2] + 16)[:, : w.shape[2]]
        assert torch.equal(modular_product(x, w, None, out), product_by_parts(x, w))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [1, 33, 128])
@pytest.mark.parametrize("width", [4096, 131071])
@pytest.mark.parametrize("digits", [1, 2])
def test_the_largest_sums_of_integers_do_not_overflow(digits: int, width: int, rows: int, dtype: torch.dtype) -> None:
    """All digits of the rows are -128, and those of the weights 127, -127 or -128; what comes is known in Python's integers."""
    size = 8 * dtype.itemsize
    number = sum(-128 << place for place in range(0, size, 8))
    wrapped = (number + (1 << size - 1)) % (1 << size) - (1 << size - 1)
    x = torch.full((rows, width), wrapped, dtype=dtype, device="cuda")
    value_N = torch.tensor([127, -127, -128], dtype=torch.int8, device="cuda").repeat(6)
    w = value_N.expand(digits, width, 18).contiguous()
    weights = [sum(value << 8 * place for place in range(digits)) for value in value_N.tolist()]
    exact = [(number * width * value + (1 << size - 1)) % (1 << size) - (1 << size - 1) for value in weights]
    expected = torch.tensor(exact, dtype=dtype).expand(rows, -1)
    assert torch.equal(modular_product(x, w).cpu(), expected)
    assert torch.equal(modular_product(x, w.transpose(1, 2).contiguous().transpose(1, 2)).cpu(), expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_private_clients_of_gpu_executors(device: str, serve: Callable, ids: Tensor) -> None:
    """Exact, so the same as of executors on a CPU, bit for bit."""
    model, ids = MODELS["llama"]().to(device), ids.to(device)
    found = []
    for place in ("cpu", "cuda"):
        one, two = (
            serve(copy.deepcopy(model).to(place), operator=name, integers=[8], listen=["tcp://127.0.0.1:0"])
            for name in ("one", "two")
        )
        wrapped = symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=symbiosis.Split(two.endpoint), verify=True)
        found.append(step(wrapped, ids))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
