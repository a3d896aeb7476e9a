"""What follows `tcp://` in a client's endpoint: where to connect, and its options."""

from pathlib import Path
from time import time
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from symbiosis.base.curve_keys import Pair, read_pair, read_publics
from symbiosis.errors import ConfigError

OPTIONS = {  # of an endpoint, each as it is written
    "server": "server=EXECUTOR.pub[,OTHER.pub]",
    "key": "key=MINE.key",
    "nccl": "nccl=yes or no: whether rows on a GPU may go by NCCL, unencrypted",
    "hosts": "hosts=HOST,HOST: where else ranks may be",  # read by `endpoints.of_rank`
}


class Address(NamedTuple):
    """Where a client connects, and with which keys."""

    where: str
    servers: tuple[str, ...] = ()  # public keys, one of which is the executor's
    own: Pair | None = None
    nccl: bool = True  # whether rows of a GPU may go by NCCL, which does not encrypt them

    @classmethod
    def parse(cls, address: str) -> "Address":
        """Parse `HOST:PORT?OPTION=VALUE&...`, and read the keys that it names.

        >>> Address.parse("127.0.0.1:7000?nccl=no").nccl
        False
        """
        where, given = cls.options(address)
        nccl = given.get("nccl", "no" if "key" in given else "yes") == "yes"
        if "key" not in given:
            return cls(where, nccl=nccl)
        servers = _valid_keys([Path(name).expanduser() for name in given["server"].split(",")])
        return cls(where, servers, read_pair(Path(given["key"]).expanduser()), nccl)

    @staticmethod
    def options(address: str) -> tuple[str, dict[str, str]]:
        """Return where to connect, and the options. Raises `ConfigError` if they are none; no file is read.

        >>> Address.options("127.0.0.1:7000?nccl=no")
        ('127.0.0.1:7000', {'nccl': 'no'})
        >>> Address.options("127.0.0.1:7000?serverr=x.pub")
        Traceback (most recent call last):
        symbiosis.errors.ConfigError: tcp://127.0.0.1:7000?serverr=x.pub: serverr is no option of an endpoint, which are server, key, nccl, hosts
        """
        where, _, query = address.partition("?")
        given = dict(parse_qsl(query, keep_blank_values=True))
        problem = ""
        if unknown := [name for name in given if name not in OPTIONS]:
            problem = f"{unknown[0]} is no option of an endpoint, which are {', '.join(OPTIONS)}"
        elif query and not given:
            problem = f"{query} is no option of an endpoint: write NAME=VALUE"
        elif ("key" in given) != ("server" in given):
            problem = f"keys come in pairs: {OPTIONS['server']}&{OPTIONS['key']}"
        elif given.get("nccl", "no") not in ("yes", "no"):
            problem = OPTIONS["nccl"]
        if problem:
            raise ConfigError(f"tcp://{address}: {problem}")
        return where, given

    def unlock(self, socket: Any, server: str = "") -> None:
        """Make `socket` prove this client's key, and accept only the executor with the key `server`, by default the first."""
        if self.own and self.servers:
            socket.curve_serverkey = (server or self.servers[0]).encode()
            socket.curve_publickey, socket.curve_secretkey = (half.encode() for half in self.own)


def _valid_keys(files: list[Path]) -> tuple[str, ...]:
    """Return the keys in an executor's `.pub` files that have not expired."""
    found = [read_publics(file) for file in files]
    keys = tuple(dict.fromkeys(key for public in found if public.expires > time() for key in public.keys))
    if not keys:
        raise ConfigError(
            f"the executor's keys in {', '.join(map(str, files))} have expired: ask its operator for new ones"
        )
    return keys
