"""Adapters that clients send. They are written to a folder as PEFT would, and read from there like any other."""

import asyncio
import json
from pathlib import Path

import msgspec
from starlette.requests import Request

from symbiosis.server.api_errors import wrong
from symbiosis.server.bodies import Bodies
from symbiosis.serving.lora.adapter import LARGE_CONFIG, LARGE_HEADER, MOST_CONFIG_PARTS, MOST_HEADER_BYTES, parts


class Metadata(msgspec.Struct):
    adapter_config: str  # the adapter's configuration, as JSON


class Header(msgspec.Struct):
    """What is read of a safetensors file's header: all else is skipped, and nothing is made of it."""

    metadata: Metadata = msgspec.field(name="__metadata__")


async def received(bodies: Bodies, most: int, request: Request, folder: Path) -> None:
    """Write the two files of an adapter into `folder`. Their contents are checked when the adapter is loaded."""
    weights = folder / "adapter_model.safetensors"
    with weights.open("wb") as file:
        await bodies.read(request, most, file)
    (folder / "adapter_config.json").write_text(await asyncio.to_thread(_config, weights))


def _config(weights: Path) -> str:
    size = weights.stat().st_size
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if MOST_HEADER_BYTES < length <= size - 8:
            raise wrong(f"the body is a safetensors file, but {LARGE_HEADER}")
        try:
            told = msgspec.json.decode(file.read(min(length, MOST_HEADER_BYTES)), type=Header).metadata.adapter_config
            if parts(told.encode()) > MOST_CONFIG_PARTS:
                raise wrong(f"the body is a safetensors file, but {LARGE_CONFIG}")
            return json.dumps(dict(json.loads(told)))
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            raise wrong(
                "the body is no safetensors file whose metadata has 'adapter_config', as JSON, or it was cut off: symbiosis.publish makes one"
            ) from None
