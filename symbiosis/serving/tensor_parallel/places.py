"""Where the ranks of a divided model may be, and its executor."""

from collections.abc import Sequence

from symbiosis.errors import ConfigError
from symbiosis.protocol.endpoints import socket_path

OVER_GPUS = False  # ranks on two H200s have answered right, and have not come back after one died; for tests and benchmarks there


def must_be_cpus(devices: Sequence[str]) -> None:
    """Raise `ConfigError` if the model would be divided over GPUs."""
    if not OVER_GPUS and any(device != "cpu" for device in devices):
        raise ConfigError(
            "a model is divided over CPUs only: over GPUs, nobody has seen ranks come back after one of them died. Serve on one GPU, or start "
            "symbiosis-executor MODEL --devices 0-3, whose ranks hold whole layers, and serve with --executor"
        )


def must_be_reachable(endpoint: str) -> None:
    """Raise `ConfigError` unless ranks, which are processes of their own, can map weights there."""
    if socket_path(endpoint) is None:
        raise ConfigError(
            f"{endpoint}: ranks take their parts of a model from an executor that they reach at local://, and map its weights"
        )
