"""One version of an adapter, as it was when it was loaded. A version never changes."""

from dataclasses import dataclass
from itertools import count

MOST_HEADER_BYTES = 8 << 20  # of a safetensors file: the names and places of some fifty thousand tensors
IS_THE_BASE = "an adapter cannot be named {!r}, which is the base's name: choose another"
LARGE_HEADER = f"its header has more than {MOST_HEADER_BYTES} bytes"
_versions = count(1)  # 0 is the base


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

    @staticmethod
    def next_version() -> int:
        return next(_versions)
