"""Names by which a server is asked for. A web page can have its own name lead to this machine (DNS rebinding), and a browser then takes what
answers here for that page's site: what is asked for by an unknown name is turned away."""

import ipaddress
import re
import socket
from collections.abc import Iterable
from functools import lru_cache

from symbiosis.errors import ConfigError

MOST_KNOWN = 64  # headers whose answer is remembered
HEADER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")  # HOST or HOST:PORT
NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[?[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*\]?")


class Hosts:
    """Names that are known. Addresses cannot be a page's name: they are known as far as others can connect.

    Args:
        bound: Where the server listens.
        more: Other names, such as that of a proxy: `*.example.org` for all of a domain, `*` for whatever is asked for.

    >>> hosts = Hosts("127.0.0.1", ["*.example.org"])
    >>> [hosts.has(name) for name in ("localhost:8000", "[::1]", "api.example.org", "rebound.example.com", "10.0.0.7")]
    [True, True, True, False, False]
    >>> Hosts("0.0.0.0").has("10.0.0.7:8000")
    True
    """

    def __init__(self, bound: str, more: Iterable[str] = ()) -> None:
        own = socket.gethostname()
        names = [_plain(name) for name in ("localhost", bound, own, own.partition(".")[0], *more)]
        self._is_open, self._names = "*" in names, {name for name in names if not name.startswith("*")}
        self._domains = tuple(name[1:] for name in names if name.startswith("*."))
        self._is_for_others = not _is_loopback(names[1])
        self.has = lru_cache(MOST_KNOWN)(self._has)  # a client asks by the same one again and again

    def _has(self, header: str) -> bool:
        """Whether a request with this `Host` may be answered."""
        if self._is_open:
            return True
        if (found := HEADER.fullmatch(header.strip())) is None:
            return False
        name = _plain(found[1])
        if name in self._names or name.endswith(self._domains):
            return True
        return _is_loopback(name) or (self._is_for_others and _address(name) is not None)


def _plain(name: str) -> str:
    """Return a name as it is compared: in small letters, without brackets and without a dot at its end."""
    return name.strip("[]").rstrip(".").lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" if address is None else address.is_loopback


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 is any that is free. Raises `OSError`."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def check_hosts(names: Iterable[str]) -> None:
    """Raise `ConfigError` for what is no name, such as a URL or a name with a port."""
    for name in names:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"allowed-hosts has {name[:80]!r}: write names such as api.example.org or *.example.org, without http:// and port"
            )
