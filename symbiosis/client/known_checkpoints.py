"""What an earlier start found out about a checkpoint: which of its tensors became which weights of a model, and the digests of those.

It lies in this user's cache, under a digest of all that decides it: the files' paths, sizes, times and inodes, the class, the dtype.
"""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import transformers

from symbiosis.base.folders import Use, temporary_folder, user_folder
from symbiosis.errors import ConfigError

logger = logging.getLogger("symbiosis")


class Made(msgspec.Struct):
    """What one step of the loader made: several tensors may become one weight, and one several."""

    sources: list[str] = []
    digests: dict[str, str] = {}  # by the names of the weights
    phases: dict[str, int] = {}  # how far from a multiple of 64 bytes they begin


def key_of(files: Sequence[str], model: Any, load_config: Any) -> str:
    """Return a digest of what decides the weights that transformers makes of a checkpoint for a model."""
    renamed = [(one.source_patterns, one.target_patterns) for one in load_config.weight_mapping or ()]
    decides = (
        [_identity(file) for file in files],
        f"{type(model).__module__}.{type(model).__qualname__}",
        model.config.to_json_string(use_diff=False),
        [str(load_config.dtype), str(renamed), transformers.__version__],
    )
    return hashlib.sha256(msgspec.json.encode(decides)).hexdigest()


def _identity(file: str) -> tuple[str, int, int, int, int]:
    path = Path(file).resolve()  # in the hub's cache, files are links
    found = path.stat()
    # `rsync --times`, and builds of images, give other contents the same mtime; nobody chooses a ctime
    return str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def read(key: str) -> list[Made]:
    """Return what is known under this key."""
    try:
        return msgspec.json.decode((_folder() / key).read_bytes(), type=list[Made])
    except (OSError, ValueError, ConfigError):
        return []


def write(key: str, made: list[Made]) -> None:
    """Keep what was made. Where it cannot be kept, a warning says so: the next start reads the whole checkpoint again."""
    try:
        with temporary_folder(within=_folder()) as part:
            (part / key).write_bytes(msgspec.json.encode(made))
            (part / key).replace(_folder() / key)
    except (OSError, ConfigError) as error:
        logger.warning("the digests of this checkpoint cannot be kept, so the next start reads it again: %s", error)


def _folder() -> Path:
    return user_folder(Use.CACHE, "checkpoints", make=True)
