"""A base may call its modules as wrappers call theirs, may have any configuration or none, and lie in wrappers itself."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import WrapError

NAMES = (
    "module",
    "original",
    "base_layer",
    "original_module",
    "parametrizations",
    "_orig_mod",
    "base_model",
    "model",
    "default",
)


class Named(nn.Module):
    """Two modules of which one bears the name, inside and outside of the other."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.ModuleDict({name: nn.Linear(8, 8), "first": nn.Linear(8, 8)})
        self.add_module(name, inner)
        self.last = nn.Sequential()
        self.last.add_module(name, nn.Linear(8, 8))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        inner = self._modules[self.name]
        return self.last(inner["first"](inner[self.name](x)))


def close(split: nn.Module, plain: nn.Module, count: int) -> None:
    x = torch.randn(3, 8)
    assert len({id(weight) for weight in remote_weights(split)}) == count
    assert torch.equal(split(x), plain(x))


@pytest.mark.parametrize("name", NAMES)
def test_a_bases_own_names(name: str, serve: Callable) -> None:
    base = Named(name).requires_grad_(False)
    executor = serve(base)
    close(symbiosis.wrap(copy.deepcopy(base), executor.endpoint), base, 3)
    config = LoraConfig(r=2, target_modules=[f"{name}.{name}", f"last.{name}"], init_lora_weights=False)
    adapted = []
    for order in ("wrap first", "PEFT first", "unsplit"):
        torch.manual_seed(1)
        model = copy.deepcopy(base)
        model = symbiosis.wrap(model, executor.endpoint) if order == "wrap first" else model
        model = get_peft_model(model, config)
        adapted.append(symbiosis.wrap(model, executor.endpoint) if order == "PEFT first" else model)
    for split in adapted[:2]:
        close(split, adapted[2], 3)
    unwrapped = symbiosis.unwrap(copy.deepcopy(adapted[0]), base.state_dict())
    close(unwrapped, adapted[2], 0)


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": lambda model: torch.compile(model, backend="eager"),  # type: ignore[dict-item]
    "DataParallel": nn.DataParallel,
    "average": torch.optim.swa_utils.AveragedModel,
}


if torch.cuda.is_available():  # it would move the model there
    del AROUND["DataParallel"]


@pytest.mark.parametrize("around", AROUND)
def test_what_lies_around_a_base_is_not_part_of_its_names(around: str, serve: Callable) -> None:
    base = Named("module").requires_grad_(False)
    close(symbiosis.wrap(AROUND[around](copy.deepcopy(base)), serve(base).endpoint), base, 3)
    close(symbiosis.wrap(copy.deepcopy(base), serve(AROUND[around](copy.deepcopy(base))).endpoint), base, 3)


def test_a_layer_that_is_the_whole_model(serve: Callable) -> None:
    base = nn.Linear(8, 8).requires_grad_(False)
    close(symbiosis.wrap(copy.deepcopy(base), serve(base).endpoint), base, 1)


def test_a_parametrized_layer_stays(serve: Callable) -> None:
    base = Named("original").requires_grad_(False)
    own = copy.deepcopy(base)
    nn.utils.parametrize.register_parametrization(own.last[0], "weight", nn.Identity())
    close(symbiosis.wrap(own, serve(base).endpoint), base, 2)


@dataclass
class Settings:
    hidden: int = 8


class Odd:
    def to_json_string(self, use_diff: bool) -> str:
        return "no JSON"


CONFIGS: dict[str, Any] = {
    "dict": {"hidden": 8}, "dataclass": Settings(), "namespace": SimpleNamespace(hidden=8), "none": None, "text": "small", "class": Settings,
    "odd": Odd(), "module": nn.Linear(2, 2),
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_any_configuration(config: str, serve: Callable) -> None:
    base = Named("inner")
    base.config = CONFIGS[config]
    executor = serve(base.requires_grad_(False))
    close(symbiosis.wrap(copy.deepcopy(base), executor.endpoint), base, 4 if config == "module" else 3)
    with pytest.raises(WrapError, match="not a transformers model: use wrap"):
        symbiosis.from_executor(executor.endpoint)


class Experts(nn.Module):
    """A stack of matrices, as transformers has them, in a model that is none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up[1]


def test_experts_of_a_model_without_configuration(serve: Callable) -> None:
    base = nn.Sequential(Experts()).requires_grad_(False)
    close(symbiosis.wrap(copy.deepcopy(base), serve(base).endpoint), base, 1)
