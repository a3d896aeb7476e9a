"""What follows `tcp://` in a client's endpoint: where to connect, and its options."""

from pathlib import Path
from time import time
from typing import Any, NamedTuple

from symbiosis.base.curve_keys import Pair, read_pair, read_publics
from symbiosis.errors import ConfigError
from symbiosis.protocol.endpoints import query_of

OPTIONS = {  # of an endpoint, each as it is written
    "server": "server=EXECUTOR.pub[,OTHER.pub]",
    "key": "key=MINE.key",
    "nccl": "nccl=yes or no: whether rows on a GPU may go by NCCL, unencrypted",
    "hosts": "hosts=HOST,HOST: where else ranks may be",  # read by `endpoints.of_rank`
}


class ClientKeys(NamedTuple):
    """The keys of a connection: the executor's, one of which it has, and the client's own. None at all without encryption."""

    servers: tuple[str, ...] = ()
    own: Pair | None = None

    def unlock(self, socket: Any, server: str = "") -> None:
        """Make `socket` prove this client's key, and accept only the executor with the key `server`, by default the first."""
        if self.own and self.servers:
            socket.curve_serverkey = (server or self.servers[0]).encode()
            socket.curve_publickey, socket.curve_secretkey = (half.encode() for half in self.own)


class Address(NamedTuple):
    """Where a client connects, and how."""

    where: str
    server: tuple[str, ...] = ()  # files with the executor's keys
    key: str = ""  # the file with the client's own
    nccl: bool = True  # whether rows of a GPU may go by NCCL, which does not encrypt them

    @classmethod
    def parse(cls, address: str) -> "Address":
        """Parse `HOST:PORT?OPTION=VALUE&...`. Raises `ConfigError` for wrong options; no file is read.

        >>> Address.parse("127.0.0.1:7000?nccl=no").nccl
        False
        """
        given = query_of(url := f"tcp://{address}")
        if unknown := [name for name in given if name not in OPTIONS]:
            raise ConfigError(f"{url}: {unknown[0]} is no option of an endpoint, which are {', '.join(OPTIONS)}")
        if ("key" in given) != ("server" in given):
            raise ConfigError(f"{url}: keys come in pairs: {OPTIONS['server']}&{OPTIONS['key']}")
        nccl = given.get("nccl", "no" if "key" in given else "yes")
        if nccl not in ("yes", "no"):
            raise ConfigError(f"{url}: {OPTIONS['nccl']}")
        servers = tuple(given["server"].split(",")) if "server" in given else ()
        return cls(address.partition("?")[0], servers, given.get("key", ""), nccl == "yes")

    def keys(self) -> ClientKeys:
        """Read the files with the keys: an executor that exchanges its own has others by the next connection."""
        if not self.key:
            return ClientKeys()
        servers = _valid_keys([Path(name).expanduser() for name in self.server])
        return ClientKeys(servers, read_pair(Path(self.key).expanduser()))


def _valid_keys(files: list[Path]) -> tuple[str, ...]:
    """Return the keys in an executor's `.pub` files that have not expired."""
    found = [read_publics(file) for file in files]
    keys = tuple(dict.fromkeys(key for public in found if public.expires > time() for key in public.keys))
    if not keys:
        raise ConfigError(
            f"the executor's keys in {', '.join(map(str, files))} have expired: ask its operator for new ones"
        )
    return keys
