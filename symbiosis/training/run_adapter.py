"""The adapter of one run: PEFT's own model over the base's weights, so that it begins, and is saved, as PEFT has it.

LoRA is computed for all runs together (`low_rank.py`), from the very parameters of PEFT's layers. At all other layers PEFT's are run on the rows of
their run, and given the base's product.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import AdapterError
from symbiosis.serving.lora.peft_layers import Skeleton, handing_out, outermost, tap
from symbiosis.training.flat_parameters import flattened
from symbiosis.training.low_rank import LowRank
from symbiosis.training.refused_adapters import PREFIXES, check_kind

NAME = "default"  # of PEFT's only adapter
_drawing = threading.RLock()  # torch's generators are everybody's: one adapter at a time draws from them


class TrainedBias(NamedTuple):
    """A bias of the base that an adapter has a value of its own for."""

    trained: nn.Parameter
    base: Tensor


class RunAdapter:
    """An adapter that is trained."""

    def __init__(self, skeleton: Skeleton, config: Any, seed: int | None) -> None:
        check_kind(config)
        with _drawing, torch.random.fork_rng():
            if seed is not None:
                torch.manual_seed(seed)
            self.peft = _made(skeleton, config)
            drawn = _random_state()
        self.virtual, self.prefix_length = in_front(config)
        layers = {} if config.is_prompt_learning else dict(outermost(self.peft.base_model.model))
        self.biases = _trained_biases(self.peft, skeleton)
        self.layers: dict[str, nn.Module | None] = {
            **dict.fromkeys(self.biases),
            **layers,
        }  # None: there is a bias only
        self._check_all_are_at_layers(layers.values())
        trained = {p: name for name, p in self.peft.named_parameters() if p.requires_grad}
        self.flats = flattened(trained, apart=lambda p: "lora_B" in trained[p])
        self.low_rank = {
            name: low for name, layer in layers.items() if name not in self.biases and (low := _low_rank(layer))
        }
        draws = any(isinstance(module, nn.Dropout) and module.p for module in self.peft.modules())
        self.drawn = drawn if draws else ()  # the state of its random numbers, if it needs any
        self.has_parameters_only = not self.biases and _has_parameters_only(layers.values(), skeleton)
        for layer in layers.values():
            tap(layer)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained, in the order in which checkpoints number it."""
        return [parameter for flat in self.flats for parameter in flat.parameters]

    @property
    def is_on_gpu(self) -> bool:
        return all(flat.values.is_cuda for flat in self.flats)

    def run(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Return what the layer of this name makes of this run's rows, of which the base made `y`."""
        if (bias := self.biases.get(name)) is not None:
            y = y + (bias.trained - bias.base).to(y.dtype)
        layer = self.layers[name]
        if layer is None:
            return y
        with self._own_random_numbers(), handing_out(x, y):
            result: Tensor = layer(x)
        return result

    def prompt(self) -> Tensor:
        """Return the embeddings in front of a sequence, [virtual, width]."""
        found: Tensor = self.peft.get_prompt(batch_size=1)[0]
        return found

    def prefix(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values in front of those of a sequence, by layer."""
        cache = self.peft.get_prompt(batch_size=1)
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers]

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter as PEFT saves it."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.peft, save_embedding_layers=False)  # type: ignore[no-any-return]

    def load(self, tensors: dict[str, Tensor]) -> None:
        from peft import set_peft_model_state_dict

        config = self.peft.peft_config[NAME]
        if config.peft_type.value == "P_TUNING" or getattr(config, "prefix_projection", False):
            raise AdapterError(
                f"PEFT saves what the encoder of {config.peft_type.value} makes, and not the encoder: it cannot go on from there"
            )

        lacking, unknown = self.tensors().keys() - tensors.keys(), tensors.keys() - self.tensors().keys()
        for name in (*lacking, *unknown):
            raise AdapterError(f"the adapter {'lacks' if name in lacking else 'has, and this one not,'} {name}")
        try:
            with torch.no_grad():
                set_peft_model_state_dict(self.peft, tensors)
        except RuntimeError as error:  # of a shape
            raise AdapterError(f"its tensors are not those of its configuration: {error}") from None

    def save(self, folder: Path) -> None:
        self.peft.save_pretrained(str(folder), save_embedding_layers=False)

    def _check_all_are_at_layers(self, layers: Iterable[nn.Module]) -> None:
        at_layers = {id(p) for layer in layers for p in layer.parameters()} | {
            id(bias.trained) for bias in self.biases.values()
        }
        if self.virtual or self.prefix_length:
            at_layers |= {id(p) for p in self.peft.prompt_encoder.parameters()}
        for name, parameter in self.peft.named_parameters():
            if parameter.requires_grad and id(parameter) not in at_layers:
                raise AdapterError(
                    f"its {name} acts elsewhere than at layers: it cannot be trained together with others"
                )
        if not any(p.requires_grad for p in self.peft.parameters()):
            raise AdapterError("nothing in it is trainable")

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """In the block, dropout draws what it would draw if the run were alone."""
        if not self.drawn:
            yield
            return
        with _drawing:
            before = _random_state()
            _draw_from(self.drawn)
            try:
                yield
            finally:
                self.drawn = _random_state()
                _draw_from(before)


def in_front(config: Any) -> tuple[int, int]:
    """Return how many tokens an adapter puts in front of a sequence, and how many keys and values."""
    if not config.is_prompt_learning:
        return 0, 0
    count: int = config.num_virtual_tokens
    return (0, count) if config.peft_type.value in PREFIXES else (count, 0)


def _made(skeleton: Skeleton, config: Any) -> Any:
    from peft import get_peft_model

    own_biases = getattr(config, "bias", "none") not in ("none", None)
    try:
        return get_peft_model(skeleton.copy(own_biases), config).train()
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError) as error:
        raise AdapterError(f"PEFT does not take it: {error}") from error


def _low_rank(layer: nn.Module) -> LowRank | None:
    """Return the matrices of a layer that does nothing else than `y + s B A x`."""
    from peft.tuners.lora import Linear

    if type(layer) is not Linear or layer.use_dora.get(NAME) or layer.lora_variant.get(NAME):
        return None
    if not isinstance(layer.get_base_layer(), nn.Linear | Conv1D) or not isinstance(
        layer.lora_dropout[NAME], nn.Identity
    ):
        return None
    a, b = layer.lora_A[NAME], layer.lora_B[NAME]
    if a.bias is not None or b.bias is not None or not a.weight.requires_grad or not b.weight.requires_grad:
        return None
    return LowRank(a.weight, b.weight, layer.scaling[NAME])


def _trained_biases(peft: Any, skeleton: Skeleton) -> dict[str, TrainedBias]:
    """Return the base's biases that are trained, by the names of their layers."""
    names, found = skeleton.names(), {}
    for name, parameter in peft.named_parameters():
        path = name.removeprefix("base_model.model.").removesuffix(".bias").removesuffix(".base_layer")
        if parameter.requires_grad and name.endswith(".bias") and path in names:
            found[path] = TrainedBias(parameter, parameter.detach().clone())
    return found


def _has_parameters_only(layers: Iterable[nn.Module], skeleton: Skeleton) -> bool:
    """Whether all that these layers hold of their own is trained."""
    base = skeleton.addresses()
    held = [t for layer in layers for t in (*layer.parameters(), *layer.buffers()) if not t.requires_grad]
    return all(isinstance(t, RemoteWeight) or t.data_ptr() in base or not t.numel() for t in held)


def _random_state() -> tuple[Tensor, ...]:
    states = (torch.random.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else states


def _draw_from(states: tuple[Tensor, ...]) -> None:
    torch.random.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
