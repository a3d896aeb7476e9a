"""Adapters that clients send. They are written to a folder as PEFT would, and read from there like any other."""

import asyncio
import json
from pathlib import Path

import msgspec
from starlette.requests import Request

from symbiosis.serving.adapter import LARGE_HEADER, MOST_HEADER_BYTES
from symbiosis.serving.http.failures import wrong
from symbiosis.serving.http.incoming.bodies import Bodies

CONFIG = "adapter_config"  # the metadata in which the configuration travels, as JSON


class Header(msgspec.Struct):
    """What is read of a safetensors file's header: all else is skipped."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


async def received(bodies: Bodies, most: int, request: Request, folder: Path) -> None:
    """Write the two files of an adapter into `folder`. Their contents are checked when the adapter is loaded."""
    weights = folder / "adapter_model.safetensors"
    with weights.open("wb") as file:
        await bodies.pieces(request, most, file.write)
    (folder / "adapter_config.json").write_text(await asyncio.to_thread(_config, weights))


def _config(weights: Path) -> str:
    size = weights.stat().st_size
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if MOST_HEADER_BYTES < length <= size - 8:
            raise wrong(f"the body is a safetensors file, but {LARGE_HEADER}")
        try:
            told = msgspec.json.decode(file.read(min(length, MOST_HEADER_BYTES)), type=Header).metadata[CONFIG]
            return json.dumps(dict(json.loads(told)))
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError):
            raise wrong(
                f"the body is no safetensors file whose metadata has {CONFIG!r}, as JSON: symbiosis.publish makes one"
            ) from None
