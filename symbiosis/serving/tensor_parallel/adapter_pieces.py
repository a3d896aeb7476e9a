"""What each rank has of an adapter. Its first matrix is whole at layers that are divided by their outputs, and its second one at layers that are
divided by their inputs. So ranks compute it without a word to one another: what they add up is the layer's and the adapter's.
"""

import os
from collections.abc import Mapping

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from symbiosis.serving.lora.adapter_cache import NAMES
from symbiosis.serving.lora.adapter_kinds import Part
from symbiosis.serving.lora.loader import AdapterContents
from symbiosis.serving.tensor_parallel.division import DividedLayer, Division
from symbiosis.serving.tensor_parallel.shares import taken, widened

PROMPT, PREFIX = "prompt", "prefix"


def piece_of(contents: AdapterContents, division: Division, rank: int) -> AdapterContents:
    """Return what a rank has of an adapter."""
    parts = {name: _of_part(part, division.layers.get(name), rank) for name, part in contents.parts.items()}
    heads = division.heads.shared[rank]
    whole = max(each.stop for each in division.heads.shared)
    prefix = tuple(
        (
            taken(keys, 1, (widened(heads, keys.shape[1] // whole),)),
            taken(values, 1, (widened(heads, values.shape[1] // whole),)),
        )
        for keys, values in contents.prefix
    )
    return contents._replace(parts=parts, prefix=prefix)


def _of_part(part: Part, layer: DividedLayer | None, rank: int) -> Part:
    """Return what a rank computes of `y = (x * before) Wᵀ * gain + shift + (x downᵀ) up`."""
    if layer is None:
        return part

    def mine(matrix: Tensor | None) -> Tensor | None:
        return None if matrix is None else taken(matrix, 1, layer.of_ranks[rank])

    if layer.by == "outputs":
        return Part(part.down, mine(part.up), part.before, mine(part.gain), mine(part.shift))
    shift = part.shift if part.shift is None or rank == 0 else torch.zeros_like(part.shift)
    return Part(mine(part.down), part.up, mine(part.before), part.gain, shift)


def tensors_of(contents: AdapterContents) -> dict[str, Tensor]:
    """Return the tensors of an adapter, by names from which `read` knows what they are."""
    tensors = {
        f"{what}:{name}": t
        for name, part in contents.parts.items()
        for what in NAMES
        if (t := getattr(part, what)) is not None
    }
    if contents.prompt is not None:
        tensors[PROMPT] = contents.prompt
    for layer, pair in enumerate(contents.prefix):
        tensors |= {f"{PREFIX}{number}:{layer}": t for number, t in enumerate(pair)}
    return tensors


def written(contents: AdapterContents) -> int:
    """Write the tensors of an adapter to memory, and return its descriptor."""
    memory = os.memfd_create("symbiosis-adapter", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(memory), "wb") as file:
        file.write(save({name: t.contiguous() for name, t in tensors_of(contents).items()}))
    return memory


def read(memory: int) -> tuple[dict[str, Part], Tensor | None, tuple[tuple[Tensor, Tensor], ...]]:
    """Return what `written` has written: parts, prompt and prefix.

    >>> from symbiosis.serving.lora.adapter_kinds import Part
    >>> made = AdapterContents("mine", "LORA", 1, {"up": Part(down=torch.ones(2, 4), up=torch.ones(2, 8))})
    >>> read(written(made))[0]["up"].down.shape
    torch.Size([2, 4])
    """
    found = load_file(f"/proc/self/fd/{memory}")
    return _parts(found), found.get(PROMPT), _prefix(found)


def _parts(found: Mapping[str, Tensor]) -> dict[str, Part]:
    of: dict[str, dict[str, Tensor]] = {}
    for key, tensor in found.items():
        what, _, name = key.partition(":")
        if what in NAMES:
            of.setdefault(name, {})[what] = tensor
    return {name: Part(**tensors) for name, tensors in of.items()}


def _prefix(found: Mapping[str, Tensor]) -> tuple[tuple[Tensor, Tensor], ...]:
    layers = sum(key.startswith(f"{PREFIX}0:") for key in found)
    return tuple((found[f"{PREFIX}0:{layer}"], found[f"{PREFIX}1:{layer}"]) for layer in range(layers))
