"""Digests, by which client and executor know that they have the same weights."""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from symbiosis.protocol import Layer

_BLOCK = 16 << 20
NOT_THE_MODEL = frozenset(("_name_or_path", "name_or_path", "transformers_version"))


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, taken block by block, so that a GPU's tensor needs no whole copy on the host."""
    sha = hashlib.sha256()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _BLOCK):
        sha.update(flat[start : start + _BLOCK].cpu().numpy().data)
    return sha.hexdigest()


def model_fingerprint(config_json: str, manifest: Iterable[Layer]) -> str:
    """Return one digest of a whole model: its configuration, and each weight's name, shape, dtype and digest."""
    sha = hashlib.sha256(of_the_model(config_json).encode())
    for layer in manifest:
        packed = f"|{layer.packed}|{layer.packed_digest}" if layer.packed else ""
        sha.update(f"{layer.name}|{layer.shape}|{layer.dtype}|{layer.digest}{packed}\n".encode())
    return sha.hexdigest()


def of_the_model(config_json: str) -> str:
    """Return what of a configuration is the model's, and not where its checkpoint lay or what wrote it.

    >>> of_the_model('{"_name_or_path": "a", "layers": 2}')
    '{"layers": 2}'
    """
    try:
        config = json.loads(config_json)
        return json.dumps({name: config[name] for name in sorted(config.keys() - NOT_THE_MODEL)})
    except (ValueError, RecursionError, AttributeError):
        return config_json
