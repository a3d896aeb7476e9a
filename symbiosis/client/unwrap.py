"""`unwrap`: gives a model its own weights again."""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from symbiosis.base.layer_names import modules_in_base, parameter_in_base
from symbiosis.client.arguments import a_model
from symbiosis.client.layers.layer_plan import base_model
from symbiosis.client.layers.virt_experts import original_of
from symbiosis.client.state_dict import is_the_executors, may_read
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.client.wrap import DECODES, Model
from symbiosis.errors import Code, WrapError

logger = logging.getLogger("symbiosis")


def unwrap(model: Model, weights: str | Path | dict[str, Tensor] | None = None) -> Model:
    """Give the model its own weights back: `weights` (a checkpoint directory or state dict), else read from the executor
    if it allows reads, else from the directory that the model was loaded from. Other weights than the executor's are refused.
    They stay frozen: to train them, call `model.requires_grad_()`.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo", allow_read=True) as executor:
    ...     model = symbiosis.unwrap(symbiosis.from_executor(executor.endpoint))
    ...     type(model.model.layers[0].mlp.up_proj).__name__
    'Linear'
    """
    a_model(model, "unwrap")
    names = _names(model)
    if not names:
        logger.warning("unwrap: nothing in this %s is wrapped, so it stays as it is", type(model).__name__)
    source = _source_of_weights(model, list(names), weights)
    values = {weight: source(weight, names[weight]) for weight in names}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, RemoteWeight):
                module._parameters[name] = nn.Parameter(values[parameter], requires_grad=False)
                module._state_dict_hooks.clear()
        module.__class__ = original_of(module)
    vars(base_model(model)).pop(DECODES, None)
    for session in {weight.handle.session for weight in names}:
        session.close()
    return model


def _names(model: nn.Module) -> dict[RemoteWeight, str]:
    """Return the names of the remote weights in this model. The executor's names may differ."""
    found: dict[RemoteWeight, str] = {}
    for _, name, module in modules_in_base(base_model(model)):
        for leaf, parameter in module._parameters.items():
            if isinstance(parameter, RemoteWeight):
                found[parameter] = parameter_in_base(name, module, leaf)
    return found


def _source_of_weights(model: nn.Module, remote: list[RemoteWeight], weights: Any) -> Any:
    if not remote:
        return None
    if weights is None and all(map(may_read, remote)):
        return lambda weight, _: weight.value().clone()
    tensors = weights if isinstance(weights, dict) else _checkpoint(model, weights)
    where = "the given weights" if weights is not None else f"the weights in {_loaded_from(model)}"

    def take(weight: RemoteWeight, name: str) -> Tensor:
        layer = weight.handle.layer
        if weight.handle.private is not None:
            return weight.value().clone()
        found = [tensors[key] for key in (name, f"{layer.name}.weight", layer.name) if key in tensors]
        found = [value for value in found if tuple(value.shape) == layer.shape]
        if not found:
            raise WrapError(f"{where} do not contain {layer.name} with shape {layer.shape}", Code.WRONG_MODEL)
        value = next((value for value in found if is_the_executors(value, layer)), None)
        if value is None:
            raise WrapError(
                f"{layer.name}: {where} differ from those that this model was wrapped with: pass weights=DIRECTORY (or a state dict) "
                "of the executor's checkpoint and revision",
                Code.WRONG_MODEL,
            )
        return value.to(weight.device, weight.dtype).contiguous().as_strided(*weight.view_of())

    return take


def _checkpoint(model: nn.Module, directory: str | Path | None) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    if not isinstance(directory, str | Path | None):
        raise WrapError(
            f"unwrap(model, {directory!r:.80}): weights is a checkpoint's directory, or a state dict ({{name: tensor}})"
        )
    path = Path(_loaded_from(model) if directory is None else directory)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() and str(path) != "." else []
    if not files and directory is not None:
        what = "has no *.safetensors in it" if path.is_dir() else "is not a directory"
        raise WrapError(
            f"unwrap(model, {str(directory)!r}): it {what}: pass the directory of the executor's checkpoint, or a state dict"
        )
    if not files:
        raise WrapError(
            "unwrap needs the weights, which this client does not have: pass weights=DIRECTORY (or a state dict), "
            "or start the executor with --allow-read"
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _loaded_from(model: nn.Module) -> str:
    """Return the directory or hub id that the model was loaded from; empty if it was built."""
    return getattr(base_model(model), "name_or_path", "")
