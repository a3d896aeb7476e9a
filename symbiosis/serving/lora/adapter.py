"""One version of an adapter, as it was when it was loaded. A version never changes."""

from dataclasses import dataclass
from itertools import count

MOST_HEADER_BYTES = 8 << 20  # of a safetensors file: the names and places of some fifty thousand tensors
IS_THE_BASE = "an adapter cannot be named {!r}, which is the base's name: choose another"
LARGE_HEADER = f"its header has more than {MOST_HEADER_BYTES} bytes"
MOST_CONFIG_PARTS = 1 << 16
LARGE_CONFIG = f"its adapter_config.json has more than {MOST_CONFIG_PARTS} values: save it again with PEFT"
versions = count(1)  # 0 is the base


def parts(json: bytes) -> int:
    """Return how many values JSON stands for at most, at memory's speed: nothing else is done in the process while they are made.

    >>> parts(b'{"a": [1, 2]}')
    3
    """
    return json.count(b",") + json.count(b"[") + json.count(b"{")


@dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class Adapter:
    """One version of an adapter. Loading the same name again makes another version, and nothing that was computed for one is used for
    the other."""

    name: str
    kind: str  # of PEFT: LORA, IA3, ...
    rank: int = 0  # the largest, where there are ranks
    bytes: int  # in host memory
    virtual: int = 0  # tokens that it puts in front of every prompt
    version: int = 0
    pages: int = 0  # of the device's memory, while it is there
