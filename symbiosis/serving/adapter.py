"""An adapter as it was when it was loaded: one version, which never changes."""

from dataclasses import dataclass
from itertools import count

_versions = count(1)  # 0 is the base


@dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class Adapter:
    """Another load of the same name is another version: nothing made by one is ever used for the other."""

    name: str
    kind: str  # of PEFT: LORA, IA3, ...
    rank: int = 0  # the largest, where there are ranks
    bytes: int  # in host memory
    virtual: int = 0  # tokens that it puts in front of every prompt
    version: int = 0

    @staticmethod
    def next_version() -> int:
        return next(_versions)
