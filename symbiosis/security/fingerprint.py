"""Digests, by which client and executor know that they have the same weights."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from symbiosis.protocol import Layer

_BLOCK = 16 << 20


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, taken block by block, so that a GPU's tensor needs no whole copy on the host."""
    sha = hashlib.sha256()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _BLOCK):
        sha.update(flat[start : start + _BLOCK].cpu().numpy().data)
    return sha.hexdigest()


def model_fingerprint(config_json: str, manifest: Iterable[Layer]) -> str:
    """Return one digest of a whole model: its configuration, and each weight's name, shape, dtype and digest."""
    sha = hashlib.sha256(config_json.encode())
    for layer in manifest:
        sha.update(f"{layer.name}|{layer.shape}|{layer.dtype}|{layer.digest}\n".encode())
    return sha.hexdigest()
