"""What a service and its ranks tell each other, as lines of JSON over stdin and stdout."""

import msgspec

from symbiosis.config import Options


class Order(msgspec.Struct, frozen=True):
    """What a rank is to do: which one it is, of which model, and the file by which ranks meet."""

    model: str
    options: Options
    rank: int
    file: str


class Ready(msgspec.Struct, frozen=True):
    """What a rank says when clients can join it: how many layers and bytes it serves, and the port of its pages, if it has any."""

    layers: int
    nbytes: int
    port: int | None
