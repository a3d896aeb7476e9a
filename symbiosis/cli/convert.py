"""`symbiosis convert`: makes a model's folder, as executors read it, of a checkpoint by `torch.distributed.checkpoint`, as FSDP writes them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import located
from symbiosis.executor.model.distributed_checkpoint import DistributedCheckpoint
from symbiosis.executor.model.load import structure

BESIDE = "token*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "*.jinja", "generation_config.json"
SHOWN = 3  # names of what is missing


def convert(checkpoint: Path, output: Path, model: str | None) -> list[str]:
    """Write the model, and return the names of the checkpoint's tensors that belong to it.

    Args:
        model: A folder or hub id with the model's config.json; default: the checkpoint's own folder.
    """
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is there already, and not empty: name another folder")
    source = located(model or str(checkpoint))
    saved = DistributedCheckpoint(checkpoint)
    made = structure(str(source))
    tensors = made.state_dict(keep_vars=True)
    prefix = prefix_of(list(tensors), list(saved.tensors))
    first: dict[int, str] = {}  # by what is tied
    for name, tensor in tensors.items():
        if prefix + name in saved.tensors:
            first.setdefault(id(tensor), name)
    if missing := [name for name, tensor in tensors.items() if id(tensor) not in first]:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise ConfigError(
            f"the checkpoint in {checkpoint} lacks {', '.join(missing[:SHOWN])}{more} of the model in {source}"
        )
    names = [prefix + name for name in first.values()]
    state = {name: read(saved, prefix + name, tensors[name]) for name in first.values()}
    made.load_state_dict(state, strict=False, assign=True)
    made.tie_weights()  # type: ignore[operator]
    kinds = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        made.config.dtype = kinds.pop()  # type: ignore[union-attr]
    made.save_pretrained(output)  # type: ignore[operator]
    for file in (file for pattern in BESIDE for file in source.glob(pattern)):
        shutil.copy(file, output)
    return names


def read(saved: DistributedCheckpoint, name: str, like: Tensor) -> Tensor:
    """Return a tensor of the checkpoint, which must have the shape that the model wants."""
    tensor = saved.read(name)
    if tensor.shape != like.shape:
        raise ConfigError(
            f"{name} has shape {tuple(tensor.shape)} in the checkpoint, and {tuple(like.shape)} in the model"
        )
    return nn.Parameter(tensor, requires_grad=False) if isinstance(like, nn.Parameter) else tensor


def prefix_of(wanted: Sequence[str], there: Sequence[str]) -> str:
    """Return what comes before the model's own names in the checkpoint, where most of them are.

    >>> prefix_of(["up.weight", "down.weight"], ["model.up.weight", "model.down.weight", "optim.state.up.weight"])
    'model.'
    """
    known = set(there)
    found = {
        name[: len(name) - len(own)]
        for own in wanted[:SHOWN]
        for name in there
        if name == own or name.endswith("." + own)
    }
    return max(sorted(found), key=lambda prefix: sum(prefix + name in known for name in wanted), default="")
