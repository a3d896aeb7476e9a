"""Finds a model's files and reads their headers, without torch. A model is a directory, a hub id, or the bundled demo model."""

import json
import math
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit
from urllib.request import getproxies

import msgspec

from symbiosis.base.sizes import cells
from symbiosis.errors import ConfigError

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"
MODEL = "MODEL is a directory with config.json and *.safetensors, a hub id, or demo"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILES = re.compile(r"\.(safetensors|json|bin|pt|pth|gguf|ckpt)$")
REACH_S = 3.0  # longest wait for the hub to accept a connection
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
LONGEST_HEADER = 100 << 20  # bytes; the limit of safetensors
AT_ONCE = 1 << 30  # bytes of whole tensors that a rank with a part of each holds while it loads
PACKED_BITS = {"int8": 8.0, "fp8": 8.0, "nf4": 4.13}  # of a value, its scales included
VALUES = {"I8": 1, "U8": 2, "I32": 8}  # of a packed weight, in one number
WHOLE = ("embed", "wte", "wpe", "lm_head", "norm")  # in the names of what `quantize` leaves as it is
BITS = re.compile(r"\d+")


class HeaderEntry(msgspec.Struct):
    """What a header of safetensors says of a tensor."""

    dtype: str
    shape: list[Size]
    data_offsets: tuple[Size, Size]


def path_of(name: str) -> Path | None:
    """Return the folder that a model's name means, or None for a hub id. A path that leads nowhere is never taken for a hub id.

    >>> path_of("demo").name
    'demo_model'
    """
    if name == "demo":
        return DEMO_MODEL
    path = Path(name).expanduser()
    if path.is_file():
        raise ConfigError(f"cannot load {name!r}: it is a file. {MODEL}")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"cannot load {name!r}: there is no config.json in it. {MODEL}")
        return path
    if is_path(name):
        raise ConfigError(f"cannot load {name!r}: no such directory")
    return None


def is_path(name: str) -> bool:
    """Whether `name` is a path. A hub id has at most one slash, no file's ending, and no folder of this machine before the slash.

    >>> [is_path(name) for name in ("org/model", "./model", "a/b/c", "model/", "model.safetensors")]
    [False, True, True, True, True]
    """
    begun = name.partition(os.sep)[0]
    return not HUB_ID.fullmatch(name) or bool(FILES.search(name)) or (begun != name and Path(begun).is_dir())


def located(name: str) -> Path:
    """Return the folder with the model's config.json: for a hub id, in the hub's cache."""
    return path_of(name) or _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError

    if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
        return Path(cached).parent
    nowhere = f"cannot load {name!r}: it is neither a directory here nor in the hub's cache"
    if reason := hub_is_out_of_reach():
        raise ConfigError(f"{nowhere}, and {reason}")
    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except LocalEntryNotFoundError:
        raise ConfigError(f"{nowhere}, and {constants.ENDPOINT} does not answer") from None
    except EntryNotFoundError:
        raise ConfigError(f"cannot load {name!r}: the hub has no config.json of it") from None
    except GatedRepoError:
        raise ConfigError(f"cannot load {name!r}: it is gated: ask its owners for access on its page, then `hf auth login`") from None  # fmt: skip
    except OSError:
        raise ConfigError(f"{nowhere}, nor does the hub show it to you (`hf auth login` if it is private)") from None


def hub_is_out_of_reach() -> str:
    """Return why the hub cannot be reached, or "" if something listens there. Behind a proxy only a download can tell."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if parts.hostname is None or parts.scheme in getproxies():
        return ""
    try:
        socket.create_connection((parts.hostname, parts.port or 443), timeout=REACH_S).close()
    except OSError:
        return f"{constants.ENDPOINT} cannot be reached"
    return ""


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers would read: none if there are only other formats."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [file for file in [folder / "model.safetensors"] if file.is_file()]
    try:
        return [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise ConfigError(f"cannot load {str(folder)!r}: {index.name} is damaged, copy it again") from None


def weights_nbytes(
    files: list[Path], dtype_bits: int | None = None, integers: tuple[int, ...] = (), quantize: str | None = None
) -> int:
    """Return the bytes that all tensors take, as stored or with floats of `dtype_bits`, and those of the integer copies of matrices. With
    `quantize`, matrices take what they take packed, but for embeddings and heads.

    >>> sizes = [weights_nbytes(weight_files(DEMO_MODEL), quantize=how) for how in ("nf4", "int8", None)]
    >>> sizes == sorted(sizes), sizes[2] < weights_nbytes(weight_files(DEMO_MODEL), integers=(8,))
    (True, True)
    """
    total = 0
    for name, kind, shape in (tensor for file in files for tensor in tensors(file)):
        if quantize and len(shape) > 1 and "F" in kind and not any(word in name for word in WHOLE):
            total += int(math.prod(shape) * PACKED_BITS[quantize]) // 8 + 4 * math.prod(shape[:-1])
        else:
            total += nbytes_of(kind, shape, dtype_bits)
        if len(shape) > 1 and ("F" in kind or kind in VALUES):
            total += sum(math.prod(shape) * VALUES.get(kind, 1) * more // 8 for more in integers)
    return total


def nbytes_of(kind: str, shape: list[int], dtype_bits: int | None = None) -> int:
    """Return the bytes of a tensor, as stored or, if it has floats, with those of `dtype_bits`.

    >>> nbytes_of("F32", [2, 3]), nbytes_of("F32", [2, 3], 16), nbytes_of("I64", [2, 3], 16)
    (24, 12, 48)
    """
    if not dtype_bits or "F" not in kind or kind.startswith("F8"):  # codes stay as they are
        dtype_bits = int((BITS.search(kind) or ["8"])[0])
    return math.prod(shape) * dtype_bits // 8


def tensors(file: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Yield the name, dtype (F32, BF16, I64, ...) and shape of each tensor, from the file's header."""
    yield from ((name, tensor.dtype, tensor.shape) for name, tensor in header(file)[0].items())


def check_whole(file: Path) -> None:
    """Raise `ConfigError` if a file is shorter than its header says."""
    found, begin = header(file)
    if begin + max((tensor.data_offsets[1] for tensor in found.values()), default=0) > file.stat().st_size:
        raise _damaged(file)


def header(file: Path) -> tuple[dict[str, HeaderEntry], int]:
    """Return the header's entry of each tensor, by name, and where the data begin."""
    if file.exists() and not file.is_file():  # a pipe would wait for ever
        raise ConfigError(f"cannot load the weights: {file} is not a file")
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            told = msgspec.json.decode(opened.read(min(length, LONGEST_HEADER)), type=dict[str, msgspec.Raw])
        told.pop("__metadata__", None)
        found = {name: msgspec.json.decode(entry, type=HeaderEntry) for name, entry in told.items()}
    except OSError as error:
        raise ConfigError(f"cannot load the weights: {file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _damaged(file) from None
    if any(cells(tensor.shape) is None for tensor in found.values()):
        raise _damaged(file)
    return found, 8 + length


def _damaged(file: Path) -> ConfigError:
    return ConfigError(f"cannot load the weights: a file is damaged or cut short, copy it again: {file}")
