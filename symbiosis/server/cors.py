"""Which pages of other sites browsers let use the server (CORS)."""

import msgspec


class Cors(msgspec.Struct, frozen=True):
    """What pages of these origins may do; without an origin, none may."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False

    def allows(self, origin: str | None) -> bool:
        """Whether a page of this origin may use the server.

        >>> Cors(("https://example.org",)).allows("https://example.org"), Cors().allows(None)
        (True, False)
        """
        return "*" in self.origins or origin in self.origins
