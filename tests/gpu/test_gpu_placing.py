"""A model that nobody gave a device is on the GPU of its executor, and so is a server's."""

from pathlib import Path

import pytest
import torch

import symbiosis
from symbiosis.serving import Engine
from tests.conftest import tiny_llama
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_mapped import Served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("nobody_else"),
]


def test_a_model_is_where_its_executor_computes(processes: Processes, tmp_path: Path) -> None:
    served = Served(processes, tmp_path)
    ids = torch.arange(2, 12)[None]
    model = symbiosis.from_executor(served.endpoint)
    assert model.device == torch.device("cuda", 0)
    with torch.no_grad():
        assert torch.equal(model(ids.cuda()).logits, tiny_llama().cuda()(ids.cuda()).logits)
    assert symbiosis.from_executor(served.endpoint, device="cpu").device == torch.device("cpu")


def test_so_is_an_engine(processes: Processes, tmp_path: Path) -> None:
    served = Served(processes, tmp_path)
    with Engine(served.endpoint, memory=1 << 26) as engine:
        assert engine._served.device == torch.device("cuda", 0)
        tokens = engine.generate([3, 4, 5], max_tokens=8, temperature=0.0).tokens
    whole = tiny_llama().cuda().generate(torch.tensor([[3, 4, 5]]).cuda(), max_new_tokens=8, do_sample=False)
    assert list(tokens) == whole[0, 3 : 3 + len(tokens)].tolist()


def test_within_one_program(caplog: pytest.LogCaptureFixture) -> None:
    with symbiosis.Executor(tiny_llama().cuda()) as executor:
        model = symbiosis.from_executor(executor.endpoint)
        ids = torch.arange(2, 12)[None].cuda()
        assert model.device == torch.device("cuda", 0)
        torch.testing.assert_close(model(ids).logits, tiny_llama().cuda()(ids).logits)
