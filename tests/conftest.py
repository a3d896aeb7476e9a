"""Fixtures: small models built from configurations, and executors that serve them.

Torch and transformers are imported where they are used: the controller of pytest-xdist imports this file, too, and all workers wait for it.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing.process
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import symbiosis
from tests.tally import pytest_runtest_makereport, pytest_sessionfinish  # noqa: F401  (hooks)

if TYPE_CHECKING:
    import torch
    from torch import nn

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: products of one thread round alike in every thread
settings.register_profile("symbiosis", deadline=None)  # a busy machine is no bug
settings.load_profile("symbiosis")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", action="store_true", help="executors of `serve` share their weights, at local://")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long forms run when `-m` names them, and only then."""
    if "soak" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what the imports made: tests collect often, and it stays to the end anyway."""
    gc.collect()
    gc.freeze()


def tiny_llama(
    hidden: int = 64, inner: int = 96, heads: int = 4, key_value_heads: int = 2, layers: int = 2, tied: bool = False
) -> nn.Module:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_value_heads, vocab_size=100, max_position_embeddings=128, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def wide_llama() -> nn.Module:
    """Wide enough for products whose sums a GPU splits."""
    return tiny_llama(2048, 5632, 16, 4)


def tiny_gpt2() -> nn.Module:
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=128, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return AutoModelForCausalLM.from_config(config).eval()


def tiny_mixtral() -> nn.Module:
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=100, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def exact(model: nn.Module) -> nn.Module:
    """Its weights made small multiples of 1/8: sums with rows of that kind are exact in any order."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = torch.randint(-8, 9, module.weight.shape, generator=generator) / 8
    return model


def products(split: nn.Module) -> int:
    """How many products a split model has asked for: calls, and those that it made itself by mapped weights."""
    figures = symbiosis.stats(split)
    return figures.calls + figures.direct


@pytest.fixture(autouse=True)
def no_process_in_unit_and_inproc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tests start no Python; compilers and the like, which the code itself calls, may run."""
    if request.path.parent.name not in ("unit", "inproc"):
        return

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this test starts a process: it belongs to tests/process")

    class Popen(subprocess.Popen):
        def __init__(self, command: object, *args: object, **options: object) -> None:
            if sys.executable in (command if isinstance(command, list | tuple) else [command]):
                refuse()
            super().__init__(command, *args, **options)

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(subprocess, "Popen", Popen)


@pytest.fixture(autouse=True)
def small_numbers_stay() -> Iterator[None]:
    """An executor that a test ran in its own thread has left it without denormal numbers."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(scope="session", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What programs note about this user is noted here, also by processes that tests start."""
    folder = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(folder)
    return folder


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": tiny_llama, "gpt2": tiny_gpt2, "mixtral": tiny_mixtral}


@pytest.fixture
def ids() -> torch.Tensor:
    import torch

    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def llama() -> nn.Module:
    return tiny_llama()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for executors that are processes."""
    from tests.processes import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def processes() -> Iterator[list]:
    """Processes that are put into this list do not outlive the test."""
    from tests.processes import killed_at_the_end

    with killed_at_the_end() as processes:
        yield processes


@pytest.fixture
def serve(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., symbiosis.Executor]]:
    """Serves a copy of a model (the test keeps the original to compare with), and closes the executor at the end. With `--share`, its
    clients map the weights, unless the test says where it listens, or looks at calls (`called`)."""
    share = request.config.option.share and not request.node.get_closest_marker("called")
    running: list[symbiosis.Executor] = []

    def start(model: nn.Module, **options: object) -> symbiosis.Executor:
        if share and not options.keys() & {"listen", "share_weights", "device"}:
            folder = tmp_path_factory.mktemp("executor")
            options |= {"listen": [f"local://{folder}/executor.sock"], "share_weights": True}
        executor = symbiosis.Executor(copy.deepcopy(model), **options)
        running.append(executor)
        return executor

    yield start
    for executor in running:
        executor.close()


@pytest.fixture
def memory_is_filled_with_nan() -> Iterator[None]:
    """What torch hands out uninitialised would show."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["inproc", "local", "tcp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "inproc": f"inproc://{request.node.name}",
        "local": f"local://{tmp_path}/executor.sock",
        "tcp": "tcp://127.0.0.1:0",
    }[request.param]


@pytest.fixture
def fake_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for nvidia-cuda-mps-control on the PATH, with directories of the test's own; where CUDA would look first."""
    from symbiosis.executor import mps

    tool = tmp_path / "bin" / mps.CONTROL
    tool.parent.mkdir()
    shutil.copy(Path(__file__).with_name("fake_mps.sh"), tool)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in (mps.PIPES, mps.LOGS, "FAKE_MPS"):  # the code under test sets the first two: take them back at the end
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", tmp_path / "default")
    yield mps.DEFAULT_PIPES
    for pid in tmp_path.rglob(f"{mps.CONTROL}.pid"):
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
