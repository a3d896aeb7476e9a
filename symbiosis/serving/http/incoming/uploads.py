"""Adapters that clients send. They are written to a folder as PEFT would, and read from there like any other."""

import asyncio
import json
import struct
from pathlib import Path

from starlette.requests import Request

from symbiosis.serving.http.failures import wrong
from symbiosis.serving.http.incoming.bodies import Bodies

CONFIG = "adapter_config"  # the metadata in which the configuration travels, as JSON
LONGEST_HEADER = 1 << 20


async def received(bodies: Bodies, most: int, request: Request, folder: Path) -> None:
    """Write the two files of an adapter into `folder`. Their contents are checked when the adapter is loaded."""
    weights = folder / "adapter_model.safetensors"
    with weights.open("wb") as file:
        await bodies.pieces(request, most, file.write)
    (folder / "adapter_config.json").write_text(await asyncio.to_thread(_config, weights))


def _config(weights: Path) -> str:
    with weights.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LONGEST_HEADER:
                raise ValueError
            told = json.loads(file.read(length))["__metadata__"][CONFIG]
            return json.dumps(dict(json.loads(told)))
        except (struct.error, ValueError, LookupError, TypeError, RecursionError):
            raise wrong(
                f"the body is no safetensors file whose metadata has {CONFIG!r}: symbiosis.publish makes one"
            ) from None
