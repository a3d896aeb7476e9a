"""Ways between client and executor. `connect` and `listen` choose one by its URL; nobody else knows which it is."""

from symbiosis.errors import ConfigError
from symbiosis.protocol import Hello
from symbiosis.transport.base import Connection, Inbox, Listener, Peer
from symbiosis.transport.reactor import Reactor

__all__ = ["Connection", "Inbox", "Listener", "Peer", "Reactor", "connect", "listen"]


def connect(url: str, hello: Hello, timeout: float) -> Connection:
    """Join the executor at `url`; `ConnectionLost` if nobody answers in `timeout` seconds."""
    scheme, address = _parts(url)
    if scheme == "inproc":
        from symbiosis.transport import inproc

        return inproc.connect(address, hello, timeout)
    if scheme == "local":
        from symbiosis.transport.local_client import LocalConnection

        return LocalConnection(address, hello, timeout)
    from symbiosis.transport.zeromq import TcpConnection

    return TcpConnection(address, hello, timeout)


def listen(url: str, reactor: Reactor, inbox: Inbox) -> Listener:
    """Answer at `url`: events on its descriptors run in `reactor`, messages go to `inbox`."""
    scheme, address = _parts(url)
    if scheme == "inproc":
        from symbiosis.transport import inproc

        return inproc.Listener(address, reactor, inbox)
    if scheme == "local":
        from symbiosis.transport import local

        return local.Listener(address, reactor, inbox)
    from symbiosis.transport import zeromq

    return zeromq.Listener(address, reactor, inbox)


def _parts(url: str) -> tuple[str, str]:
    scheme, separator, address = url.partition("://")
    if not separator or not address or scheme not in ("inproc", "local", "tcp"):
        raise ConfigError(f"{url!r} is no endpoint: write inproc://NAME, local:///PATH/TO/SOCKET or tcp://HOST:PORT")
    return scheme, address
