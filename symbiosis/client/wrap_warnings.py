"""The warnings of `wrap`, about things that may be intended and are therefore no errors."""

import json
import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from symbiosis.base.layer_selection import head_names, is_in
from symbiosis.client.layers.layer_plan import OTHER_SHAPE, WrapReport, base_model
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import RemoteWeight

logger = logging.getLogger("symbiosis")
PACKED = "%s holds these weights packed as %s, so results are those of the packed weights, and not of this checkpoint's"
# Of a configuration, what decides results; the rest is of shapes, training, generation and tokens.
DECIDES = ("*rope_*", "*norm*", "*_eps", "*epsilon*", "*_act", "*activation*", "*head*", "*_per_tok", "*window*", "*softcap*", "*scal*", "*multiplier*", "*rotary*", "*layer_types*")  # fmt: skip


def warn_of_differences(model: nn.Module, session: Session, report: WrapReport) -> None:
    """Warn of differences that may be intended, but give other results than the executor's model."""
    shapes = [f"{name}: {reason}" for name, reason in report.kept.items() if reason.startswith(OTHER_SHAPE)]
    if shapes:
        logger.warning(
            "%d of the layers that %s serves stay with this client: %s",
            len(shapes),
            session.endpoint,
            "; ".join(shapes[:4]),
        )
    packed = sorted({layer.packed for layer in session.manifest if layer.packed and layer.name in report.wrapped})
    if packed and not getattr(base_model(model), "is_quantized", False):
        logger.warning(PACKED, session.endpoint, " and ".join(packed))
    config = getattr(base_model(model), "config", None)
    mine = _settings(json.loads(config.to_json_string(use_diff=False))) if isinstance(config, PreTrainedConfig) else {}
    theirs = _settings(json.loads(session.welcome.config))
    settings = [
        f"{key} is {mine[key]!r} here and {theirs[key]!r} there"
        for key in mine
        if theirs.get(key, mine[key]) != mine[key]
    ]
    if settings:
        logger.warning(
            "this model is configured differently from that of %s, so its results differ: %s",
            session.endpoint,
            "; ".join(settings),
        )


def warn_of_heads(model: nn.Module, session: Session, names: Sequence[str]) -> None:
    """Warn if the operator serves heads that the client did not ask for."""
    heads = head_names(base_model(model))
    if served := [name for name in names if is_in(name, heads)]:
        logger.warning(
            "%s serves heads (%s), whose gradients reveal the labels to its operator: to keep them here, wrap(model, layers='!%s')",
            session.endpoint,
            _some(served),
            served[0],
        )


def warn_when_trained(root: nn.Module) -> None:
    """Warn, once, if the model is trained as a whole after all: weights that were trainable before `wrap` are frozen since."""
    root._symbiosis_trainable = [p for p in root.parameters() if p.requires_grad]  # type: ignore[assignment]
    root.register_forward_pre_hook(_say_what_is_frozen)


def _say_what_is_frozen(root: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling() or not (root.training and torch.is_grad_enabled()):
        return
    for number, hook in list(root._forward_pre_hooks.items()):
        if hook is _say_what_is_frozen:
            del root._forward_pre_hooks[number]
    kept = root.__dict__.pop("_symbiosis_trainable")
    frozen = [name for name, p in root.named_parameters() if isinstance(p, RemoteWeight)]
    if frozen and all(parameter.requires_grad for parameter in kept):  # nobody has frozen the base, as PEFT does
        logger.warning(
            "%d weights that were trainable before wrap are frozen and not trained, since the executor holds them (%s): to train a layer, "
            "keep it, wrap(model, layers='!NAME'), or, where the executor allows reads, ask for it: weight.requires_grad_(True)",
            len(frozen),
            _some(frozen),
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _settings(config: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the settings that decide results, by name; those of a part as `part.name`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _settings(value, f"{path}{name}.")
        elif any(fnmatchcase(path + name, pattern) for pattern in DECIDES):
            found[path + name] = value
    return found
