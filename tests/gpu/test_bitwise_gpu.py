"""`bitwise` on a GPU: engines that could not keep it do not begin."""

import pytest
import torch

from symbiosis.errors import ConfigError
from symbiosis.serving import Engine as Sampler
from symbiosis.training import Engine
from tests.conftest import tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("engine", [Sampler, Engine])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_it_is_refused_by_name(engine: type, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="bitwise is for a CPU so far, and the model is on cuda"):
        engine(tiny_llama().to("cuda", dtype), bitwise=True)
