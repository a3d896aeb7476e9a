"""What a front end is told when it starts. All else it reads in what the cluster tells; so there can be several."""

import msgspec


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The only argument of a front end's process."""

    cluster: str
    listener: int  # a file descriptor
    name: str = "front"
    port: int = 0  # of its own pages; 0: any
    host: str = "127.0.0.1"  # where it listens
    allowed_hosts: tuple[str, ...] = ()
    api_keys: str | None = None
    limits: dict[str, int] = {}
    front_ends: int = 1  # which keep the limits together
    decision_log: str | None = None
    drain_s: float = 30.0
