"""Integers that look random without the key: AES-256 in counter mode."""

import os

import torch
from torch import Tensor

KEY_BYTES = 32
_BLOCK = 16


def new_key() -> bytes:
    """Return a new key from the operating system, which never repeats one, not even after a fork or a restart."""
    return os.urandom(KEY_BYTES)


def keystream(key: bytes, shape: tuple[int, ...], dtype: torch.dtype, stream: int = 0, start: int = 0) -> Tensor:
    """Return the rows from `start` on of one of a key's streams. Every row begins with a block of its own.

    >>> rows = keystream(bytes(32), (3, 5), torch.int32)
    >>> torch.equal(keystream(bytes(32), (2, 5), torch.int32, start=1), rows[1:])
    True
    """
    # imported here, because most programs do not need them, nor the 4 MiB that they take
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    rows, width = shape
    blocks = -(-width * dtype.itemsize // _BLOCK)  # of one row
    nbytes = rows * blocks * _BLOCK
    memory = torch.zeros(nbytes + _BLOCK, dtype=torch.uint8)
    counter = (stream << 64 | start * blocks).to_bytes(_BLOCK, "big")
    view = memory.numpy().data
    Cipher(AES256(key), CTR(counter)).encryptor().update_into(view[:nbytes], view)  # zeros, in their place
    return memory[:nbytes].view(dtype).view(rows, blocks * _BLOCK // dtype.itemsize)[:, :width].contiguous()
