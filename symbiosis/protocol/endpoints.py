"""The URLs at which executors answer: what they may look like, what each kind can do, who can reach it, and which are meant by default."""

import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from symbiosis.base.folders import Use, user_folder
from symbiosis.errors import CallError, Code, ConfigError

SCHEMES = ("inproc", "local", "tcp")
CLUSTERS = "clusters"  # the folder of all clusters of a user
FIRST_OPEN_PORT, LAST_PORT = 1024, 65535  # those below are for servers of the system
BETWEEN_URLS = re.compile(r"[\s,]+(?=\w+://)")
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]")


def parts_of(url: str) -> tuple[str, str]:
    """Return the scheme and the address of an endpoint.

    >>> parts_of("tcp://127.0.0.1:7000")
    ('tcp', '127.0.0.1:7000')
    """
    scheme, separator, address = url.partition("://")
    if scheme in ("http", "https"):
        raise ConfigError(
            f"{url!r} is a web page, such as an executor's metrics, not an endpoint: write the URL of its --listen, local:///PATH/TO/SOCKET or "
            "tcp://HOST:PORT"
        )
    if not separator or not address or scheme not in SCHEMES:
        raise ConfigError(
            f"{url!r} is not an endpoint: write inproc://NAME, local:///PATH/TO/SOCKET or tcp://HOST:PORT"
        )
    port = address.partition("?")[0].rpartition(":")[2]
    if scheme == "tcp" and not (port == "*" or (port.isdecimal() and int(port) <= LAST_PORT)):
        raise ConfigError(f"{url!r} is not an endpoint: write tcp://HOST:PORT with a port from 0 to {LAST_PORT}")
    return scheme, address


def query_of(url: str) -> dict[str, str]:
    """Return the options that follow the `?` of an endpoint, decoded. A `+` is a plus, as in a path. Raises `ConfigError` for what is no
    option, has no value, or is given twice.

    >>> query_of("tcp://host:7000?key=c%2B%2B/my+own.key&nccl=no")
    {'key': 'c++/my+own.key', 'nccl': 'no'}
    """
    given: dict[str, str] = {}
    query = url.partition("?")[2]
    for part in query.split("&") if query else ():
        name, _, value = map(unquote, part.partition("="))
        if not value:
            raise ConfigError(f"{url}: {part or '&'} is no option of an endpoint: write NAME=VALUE")
        if name in given:
            raise ConfigError(f"{url}: {name} is given twice: write it once")
        given[name] = value
    return given


def of_rank(url: str, rank: int, here: int = 0, hosts: Sequence[str] = ()) -> str:
    """Return where a rank of a service answers, if rank number `here` answers at `url`. The first one has the service's name. `hosts`: of each
    rank, those of one host behind each other, if there are several. That is what an executor says: one that `url` does not name is refused.

    >>> of_rank("local:///a.sock", 1), of_rank("tcp://host:7001?key=a.key", 0, here=1)
    ('local:///a.sock.rank1', 'tcp://host:7000?key=a.key')
    >>> of_rank("tcp://x:7001?hosts=a,b", 2, here=1, hosts=("a", "a", "b", "b"))
    'tcp://b:7000?hosts=a,b'
    >>> of_rank("tcp://x:0", 0)
    'tcp://x:0'
    """
    scheme, address = parts_of(url)
    if scheme != "tcp":
        name = address.removesuffix(f".rank{here}") if here else address
        return f"{scheme}://{name}.rank{rank}" if rank else f"{scheme}://{name}"
    place, mark, query = address.partition("?")
    host, _, port = place.rpartition(":")
    if hosts:
        if hosts[rank] != hosts[here]:
            host = _named_host(url, hosts[rank], hosts)
        rank, here = rank - hosts.index(hosts[rank]), here - hosts.index(hosts[here])
    if rank == here:  # its port may be one that is still to be chosen
        return f"tcp://{host}:{port}{mark}{query}"
    if not 0 < (at := int(port) + rank - here) <= LAST_PORT:
        raise ConfigError(
            f"{url}: rank {rank} of the service would answer at port {at}, and there is none: write a lower one"
        )
    return f"tcp://{host}:{at}{mark}{query}"


def _named_host(url: str, host: str, hosts: Sequence[str]) -> str:
    """Return `host` if the endpoint names it, or raise `CallError`: an executor does not say where its clients connect to."""
    if host in query_of(url).get("hosts", "").split(","):
        return host
    place, _, query = url.partition("?")
    others = [part for part in query.split("&") if part and not part.startswith("hosts=")]
    named = "&".join([*others, f"hosts={','.join(dict.fromkeys(hosts))}"])
    raise CallError(
        Code.NOT_ALLOWED,
        f"the executor at {place} says that a part of its model is on {host}, which the endpoint does not name. If these hosts are its "
        f"operator's, write {place}?{named}",
    )


def is_within_process(url: str) -> bool:
    """Whether only the executor's own process can reach it.

    >>> is_within_process("inproc://a"), is_within_process("local:///a.sock")
    (True, False)
    """
    return url.startswith("inproc://")


def socket_path(url: str) -> Path | None:
    """Return the Unix socket of an endpoint whose clients share memory with the executor, None if it has none.

    >>> socket_path("local:///a.sock"), socket_path("tcp://127.0.0.1:7000")
    (PosixPath('/a.sock'), None)
    """
    return Path(url.removeprefix("local://")) if url.startswith("local://") else None


def reaches_other_hosts(url: str) -> bool:
    """Whether clients on other hosts can reach it.

    >>> reaches_other_hosts("tcp://10.0.0.1:7000"), reaches_other_hosts("local:///a.sock")
    (True, False)
    """
    return url.startswith("tcp://")


def how_to_start_one(url: str) -> str:
    """Return what to tell a user when no executor answers at `url`.

    >>> how_to_start_one("local:///a.sock")
    'Start one with: symbiosis-executor MODEL --listen local:///a.sock'
    >>> how_to_start_one("local:///run/symbiosis/clusters/lab/demo-executor-1.sock")
    'It is one of a cluster, which starts it again while it runs: symbiosis cluster status lab'
    """
    if (path := socket_path(url)) is not None and path.parent.parent.name == CLUSTERS:
        name = path.parent.name.partition("@")[0]
        return f"It is one of a cluster, which starts it again while it runs: symbiosis cluster status {name}"
    if is_within_process(url):
        return f"Start one with: symbiosis.Executor(model, listen={url!r}), in this program"
    return f"Start one with: symbiosis-executor MODEL --listen {url.partition('?')[0]}"


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to HOST:PORT.

    >>> is_loopback("[::1]:7000"), is_loopback("0.0.0.0:7000")
    (True, False)
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_to_others(address: str) -> str:
    """Return the error message for an address that other machines can reach, without keys."""
    return (
        f"tcp://{address} can be reached from other machines: give --key and --tenants (symbiosis keygen makes keys), "
        "or listen at 127.0.0.1"
    )


def named_endpoints(text: str) -> tuple[str, ...]:
    """Return the URLs in a text, separated by spaces or commas. A comma that no URL follows may be part of a path.

    >>> named_endpoints("tcp://host:1, local:///a.sock")
    ('tcp://host:1', 'local:///a.sock')
    """
    return tuple(found for url in BETWEEN_URLS.split(text) if (found := url.strip(" \t\n,")))


def default_endpoints() -> tuple[str, ...]:
    """Return the endpoints in $SYMBIOSIS_ENDPOINT, separated by spaces or commas, else this user's socket on this host."""
    text = os.environ.get("SYMBIOSIS_ENDPOINT", "")
    if named := named_endpoints(text):
        return named
    if text:
        raise ConfigError(f"$SYMBIOSIS_ENDPOINT is {text!r:.80}, which names no executor: write its URL, or unset it")
    return (f"local://{user_folder(Use.RUNTIME) / 'executor.sock'}",)
