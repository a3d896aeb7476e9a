"""Checkpoints: folders that are there as a whole or not at all, are never written again, and may have a time to live."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors import SafetensorError

from symbiosis.errors import AdapterError, ConfigError
from symbiosis.training.run_journal import no_room
from symbiosis.training.train_state import TrainState

LIFE = "checkpoint.json"  # beside PEFT's files: until when it is kept


class CheckpointTimes(msgspec.Struct, frozen=True):
    made: float
    expires: float | None = None


class Checkpoint(NamedTuple):
    """A checkpoint of a folder.

    Args:
        expires: When it may be removed, in seconds since 1970; None: never.
    """

    path: Path
    made: float
    expires: float | None
    nbytes: int


def write_checkpoint(state: TrainState, target: Path, ttl_s: float | None) -> Path:
    """Write a run's adapter and its optimizer's state."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already, and a checkpoint is never written again: choose another name")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir()
        state.save(part)
        made = time.time()
        (part / LIFE).write_bytes(msgspec.json.encode(CheckpointTimes(made, None if ttl_s is None else made + ttl_s)))
        part.rename(target)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise no_room(target, error) from error
        raise
    return target


def check_adapter(folder: Path) -> None:
    """Refuse a folder that is no adapter, or has expired."""
    if not (folder / "adapter_config.json").is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise AdapterError(f"{folder} is no adapter: it needs adapter_config.json and adapter_model.safetensors")
    life = _life(folder)
    if life is not None and life.expires is not None and life.expires <= time.time():
        raise AdapterError(f"{folder} has expired: save checkpoints with a longer ttl_seconds, or without one")


def checkpoints(folder: str | Path) -> list[Checkpoint]:
    """Return the checkpoints anywhere within a folder, the oldest first.

    >>> checkpoints("/nowhere")
    []
    """
    return sorted(_within(Path(folder)), key=lambda each: (each.made, each.path))


def expire(folder: str | Path, now: float | None = None) -> list[Path]:
    """Remove the checkpoints within a folder whose time is over, and return where they were.

    >>> expire("/nowhere")
    []
    """
    now = time.time() if now is None else now
    gone = [each.path for each in checkpoints(folder) if each.expires is not None and each.expires <= now]
    for path in gone:
        away = path.with_name(f".{path.name}.{os.getpid()}.gone")  # who reads it meanwhile finds all of it, or nothing
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)
    return gone


def _within(folder: Path) -> Iterator[Checkpoint]:
    for file in folder.rglob(LIFE):
        path = file.parent
        if path.name.startswith("."):
            continue
        if (life := _life(path)) is not None:
            yield Checkpoint(path, life.made, life.expires, sum(f.stat().st_size for f in path.iterdir()))


def _life(folder: Path) -> CheckpointTimes | None:
    try:
        return msgspec.json.decode((folder / LIFE).read_bytes(), type=CheckpointTimes)
    except (OSError, msgspec.MsgspecError):
        return None
