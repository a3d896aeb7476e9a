"""Where the executor of a divided model may be."""

from symbiosis.errors import ConfigError
from symbiosis.protocol.endpoints import socket_path


def must_be_reachable(endpoint: str) -> None:
    """Raise `ConfigError` unless ranks, which are processes of their own, can map weights there."""
    if socket_path(endpoint) is None:
        raise ConfigError(
            f"{endpoint}: ranks take their parts of a model from an executor that they reach at local://, and map its weights"
        )
