"""One server for thousands of adapters on one base: requests of different adapters run in one batch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symbiosis.serving.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """The engine is imported when it is used: those who only ask a server need no torch."""
    if name != "Engine":
        raise AttributeError(f"module 'symbiosis.serving' has no attribute {name!r}")
    from symbiosis.serving.engine.engine import Engine

    return Engine
