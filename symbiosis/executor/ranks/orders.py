"""What a service and its ranks tell each other, as lines of JSON over stdin and stdout."""

import msgspec

from symbiosis.executor.options import Options


class Order(msgspec.Struct, frozen=True):
    """What a rank is to do: which one it is, of which model, and the file by which ranks meet. `parts`: files with the parts of all ranks, if the
    service has kept them from a rank's earlier life."""

    model: str
    options: Options
    rank: int
    file: str
    parts: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True):
    """What a rank says when clients can join it: how many layers and bytes it holds, the port of its pages, and the descriptor of its part of
    all tensors, if it has such."""

    layers: int
    nbytes: int
    port: int | None = None
    part: int | None = None
    fingerprint: str = ""  # of the whole model
