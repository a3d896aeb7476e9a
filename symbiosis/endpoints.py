"""The URLs at which executors answer: what they may look like, and who can reach them."""

import ipaddress

from symbiosis.errors import ConfigError

SCHEMES = ("inproc", "local", "tcp")
LAST_PORT = 65535


def parts_of(url: str) -> tuple[str, str]:
    """Scheme and address of an endpoint.

    >>> parts_of("tcp://127.0.0.1:7000")
    ('tcp', '127.0.0.1:7000')
    """
    scheme, separator, address = url.partition("://")
    if not separator or not address or scheme not in SCHEMES:
        raise ConfigError(f"{url!r} is no endpoint: write inproc://NAME, local:///PATH/TO/SOCKET or tcp://HOST:PORT")
    port = address.partition("?")[0].rpartition(":")[2]
    if scheme == "tcp" and not (port == "*" or (port.isdecimal() and int(port) <= LAST_PORT)):
        raise ConfigError(f"{url!r} is no endpoint: write tcp://HOST:PORT with a port from 0 to {LAST_PORT}")
    return scheme, address


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
    """What is wrong with a HOST:PORT beyond loopback where no keys guard it."""
    return (
        f"tcp://{address} can be reached from other machines: give --key and --tenants (symbiosis keygen makes keys), "
        "or listen at 127.0.0.1"
    )
