"""A run's folder: a process may be killed at any moment, and no command that was acknowledged is lost.

    adapter_config.json, run.json    what it began with
    state-N.safetensors              all that commands change, as it was after some command
    log-N                            the commands since, one after another, each with its result

A command is done, then written to the log, then acknowledged. Who opens the folder takes the state and does the commands of the log again. The
state is written anew, under the next number, when the commands since it have taken `RATIO` times as long as writing it: so that takes a
tenth of the time, at most, and doing commands again no longer than ten times what writing takes.
"""

import os
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from symbiosis.errors import AdapterError
from symbiosis.training.datum import Datum
from symbiosis.training.mismatch import Mismatch
from symbiosis.training.train_state import TrainState

RATIO = 10.0
LONGEST = 64 << 20  # bytes of a log
FRAME = 8  # bytes in front of a record: its length, and its checksum


class DatumRecord(msgspec.Struct, array_like=True, frozen=True):
    """A `Datum`, as bytes."""

    tokens: bytes
    targets: bytes
    columns: int
    weights: bytes | None
    logprobs: bytes | None
    advantages: bytes | None
    ahead: int = 0

    @classmethod
    def of(cls, datum: Datum) -> "DatumRecord":
        columns = datum.targets.shape[1] if datum.targets.dim() == 2 else 0
        weights, logprobs, advantages = (
            None if t is None else packed(t) for t in (datum.weights, datum.logprobs, datum.advantages)
        )
        tokens, targets = _whole(datum.tokens), _whole(datum.targets)
        return cls(tokens, targets, columns, weights, logprobs, advantages, datum.ahead)

    def datum(self) -> Datum:
        tokens, targets = (torch.from_numpy(np.frombuffer(t, "<i8").copy()) for t in (self.tokens, self.targets))
        shape = (len(tokens), self.columns) if self.columns else (len(tokens),)
        weights, logprobs, advantages = (
            None if t is None else unpacked(t).view(shape) for t in (self.weights, self.logprobs, self.advantages)
        )
        return Datum(tokens, targets.view(shape), weights, logprobs, advantages).moved(self.ahead)


class Record(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A command and its result.

    Args:
        number: If it has one.
        is_past: The state knows of it; only its result is kept.
        slopes: Derivatives by the log probabilities, of a loss that only the program knew.
        words: What a step was asked for.
        text: What a call returned: of a save, the path.
    """

    verb: str
    number: int | None = None
    is_past: bool = False
    data: list[DatumRecord] = []
    kind: str = ""
    config: dict[str, float] = {}
    slopes: list[bytes] | None = None
    words: dict[str, Any] = {}
    error: str | None = None
    loss: float = 0.0
    logprobs: list[tuple[bytes, int]] = []
    joined: int = 1
    mismatch: Mismatch | None = None
    norm: float = 0.0
    text: str = ""


class About(msgspec.Struct, frozen=True):
    """What a run began with, besides its configuration."""

    tenant: str
    seed: int
    lora_plus: float


class RunJournal:
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about = msgspec.json.decode((folder / "run.json").read_bytes(), type=About)
        numbers = [int(path.name.partition("-")[2]) for path in folder.glob("log-*") if path.suffix != ".part"]
        states = {int(path.stem.partition("-")[2]) for path in folder.glob("state-*.safetensors")}
        self._number = max((n for n in numbers if n in states or not n), default=0)
        self._length = 0
        self.since = 0  # commands since the state
        self._since_s = self._write_s = 0.0
        self.key = (folder / "adapter_config.json").read_text() + str(self.about.lora_plus)

    @classmethod
    def begin(cls, folder: Path, config: Any, about: About, loaded: TrainState | None = None) -> "RunJournal":
        """Make the folder of a run, which is there as a whole or not at all; of one that begins with a checkpoint, with its state."""
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            config.save_pretrained(str(part))
            (part / "run.json").write_bytes(msgspec.json.encode(about))
            if loaded is not None:
                save_file(loaded.tensors(), part / "state-1.safetensors", {"steps": str(loaded.steps)})
                (part / "log-1").touch()
            part.rename(folder)
        except BaseException as error:
            shutil.rmtree(part, ignore_errors=True)
            raise no_room(folder, error) if isinstance(error, OSError) else error from None
        return cls(folder)

    def config(self) -> Any:
        return config_of(self.folder)

    @property
    def has_state(self) -> bool:
        return self._state(self._number).exists()

    def steps(self) -> int:
        """Return how many steps the state has made."""
        if not self.has_state:
            return 0
        try:
            with safe_open(self._state(self._number), "pt") as opened:
                return int(opened.metadata()["steps"])
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{self._state(self._number)} is cut off or damaged: {error}") from error

    def tensors(self) -> dict[str, Tensor]:
        try:
            return load_file(self._state(self._number))
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{self._state(self._number)} is cut off or damaged: {error}") from error

    def records(self) -> Iterator[Record]:
        """Yield what the log tells. What a killed process has left at its end is written over by the next record."""
        contents = self._log(self._number).read_bytes() if self._log(self._number).exists() else b""
        self._length = self.since = 0
        while len(contents) - self._length >= FRAME:
            head = contents[self._length : self._length + FRAME]
            body = contents[self._length + FRAME :][: int.from_bytes(head[:4], "little")]
            if len(body) < int.from_bytes(head[:4], "little") or zlib.crc32(body) != int.from_bytes(head[4:], "little"):
                return
            record = msgspec.msgpack.decode(body, type=Record)
            self._length += FRAME + len(body)
            self.since += not record.is_past
            yield record

    def append(self, record: Record, took_s: float) -> None:
        """Add a command that was done. Raises `OSError` if there is no room for it: then nothing was written."""
        written = _framed(record)
        descriptor = os.open(self._log(self._number), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, self._length)
            _write(descriptor, written, self._length)
        except OSError:
            os.ftruncate(descriptor, self._length)
            raise
        finally:
            os.close(descriptor)
        self._length += len(written)
        self.since += 1
        self._since_s += took_s

    @property
    def is_due(self) -> bool:
        """Whether the state is to be written."""
        return self._since_s >= RATIO * self._write_s or self._length > LONGEST

    def write(self, tensors: dict[str, Tensor], steps: int, past: list[Record]) -> None:
        """Write the state anew, and the results that are kept into a log that begins with them. Raises `OSError` if there is no room: then the
        one before is still there."""
        began, number = time.monotonic(), self._number + 1
        part = self.folder / f"state-{number}.part"
        results = b"".join(_framed(msgspec.structs.replace(each, is_past=True)) for each in past)
        try:
            self._log(number).write_bytes(results)
            save_file(tensors, part, {"steps": str(steps)})
            part.rename(self._state(number))
        except (OSError, SafetensorError) as error:
            self._since_s, self._write_s = 0.0, max(self._write_s, time.monotonic() - began)  # it is tried again later
            part.unlink(missing_ok=True)
            self._log(number).unlink(missing_ok=True)
            raise no_room(self._state(number), error) from error
        for old in (self._state(self._number), self._log(self._number)):
            old.unlink(missing_ok=True)
        self._number, self._length = number, len(results)
        self.since, self._since_s, self._write_s = 0, 0.0, time.monotonic() - began

    def remove(self) -> None:
        gone = self.folder.with_name(f".{self.folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        self.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _state(self, number: int) -> Path:
        return self.folder / f"state-{number}.safetensors"

    def _log(self, number: int) -> Path:
        return self.folder / f"log-{number}"


@contextmanager
def restoring(folder: Path) -> Iterator[None]:
    """In the block, what a damaged folder leads to is an `AdapterError` that names it."""
    try:
        yield
    except (msgspec.MsgspecError, LookupError, ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise AdapterError(
            f"{folder} could not be restored, and may be damaged: {type(error).__name__}: {error}"
        ) from error


def config_of(folder: Path) -> Any:
    """Return the configuration of an adapter that is to be trained."""
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, LookupError, AttributeError, ImportError, RecursionError) as error:
        raise AdapterError(f"{folder / 'adapter_config.json'} is no configuration of PEFT: {error}") from None
    config.inference_mode = False
    return config


def no_room(path: Path, error: Exception) -> OSError:
    """Return what is said when something could not be written."""
    number = getattr(error, "errno", None)
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return OSError(number, f"{path} could not be written ({why}): make room and try again")


def packed(tensor: Tensor) -> bytes:
    return tensor.detach().float().cpu().contiguous().numpy().tobytes()


def unpacked(numbers: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(numbers, "<f4").copy())


def _whole(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().astype("<i8").tobytes()


def _framed(record: Record) -> bytes:
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def _write(descriptor: int, contents: bytes, at: int) -> None:
    left = memoryview(contents)
    while left:
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count
