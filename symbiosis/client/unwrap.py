"""`unwrap`: a model has its own weights again."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from symbiosis.client.places import base_model
from symbiosis.client.remote_weight import RemoteWeight, remote_weights
from symbiosis.client.state import is_the_executors
from symbiosis.client.virt_layer import ORIGINAL
from symbiosis.client.wrap import DECODES, Model
from symbiosis.errors import Code, WrapError


def unwrap(model: Model, weights: str | Path | dict[str, Tensor] | None = None) -> Model:
    """Give the model its own weights back: `weights` (a checkpoint directory or state dict), else read from the executor
    if it allows reads, else from the directory that the model was loaded from. Other weights than the executor's are refused.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo", allow_read=True) as executor:
    ...     model = symbiosis.unwrap(symbiosis.from_executor(executor.endpoint))
    ...     type(model.model.layers[0].mlp.up_proj).__name__
    'Linear'
    """
    found: dict[int, RemoteWeight] = {id(weight): weight for weight in remote_weights(model)}
    source = _source_of_weights(model, list(found.values()), weights)
    values = {key: source(weight) for key, weight in found.items()}
    sessions = {weight.handle.session for weight in found.values()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, RemoteWeight):
                module._parameters[name] = nn.Parameter(values[id(parameter)], requires_grad=False)
                module._state_dict_hooks.clear()
                module.__class__ = ORIGINAL.get(type(module), type(module))
    vars(base_model(model)).pop(DECODES, None)
    for session in sessions:
        session.close()
    return model


def _source_of_weights(model: nn.Module, remote: list[RemoteWeight], weights: Any) -> Any:
    if not remote:
        return None
    if weights is None and remote[0].handle.session.welcome.allow_read:
        return lambda weight: weight.value().clone()
    tensors = weights if isinstance(weights, dict) else _checkpoint(model, weights)
    where = "the given weights" if weights is not None else f"the weights in {_loaded_from(model)}"

    def take(weight: RemoteWeight) -> Tensor:
        layer = weight.handle.layer
        value = tensors.get(f"{layer.name}.weight", tensors.get(layer.name))
        if value is None or tuple(value.shape) != layer.shape:
            raise WrapError(f"{where} have no {layer.name} of shape {layer.shape}", Code.WRONG_MODEL)
        if not is_the_executors(value, layer):
            raise WrapError(
                f"{layer.name}: {where} differ from those that this model was wrapped with: pass weights=DIRECTORY (or a state dict) "
                "of the executor's checkpoint and revision",
                Code.WRONG_MODEL,
            )
        return value.to(weight.device, weight.dtype)

    return take


def _checkpoint(model: nn.Module, directory: str | Path | None) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    path = Path(directory or _loaded_from(model) or "/nonexistent")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files:
        raise WrapError(
            "unwrap needs the weights, which this client does not have: pass weights=DIRECTORY (or a state dict), "
            "or start the executor with --allow-read"
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _loaded_from(model: nn.Module) -> str:
    """A directory or a hub id; empty if the model was built."""
    return getattr(base_model(model), "name_or_path", "")
