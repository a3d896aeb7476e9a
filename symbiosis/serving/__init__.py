"""One server for thousands of adapters on one base: requests of different adapters run in one batch.

>>> import symbiosis
>>> with symbiosis.Executor("demo") as executor, symbiosis.serving.Engine(executor.endpoint, memory=1 << 24) as engine:
...     engine.vocabulary
258
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symbiosis.serving.engine.llm_engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Import the engine when it is used: a program that only asks a server needs no torch."""
    if name != "Engine":
        raise AttributeError(f"module 'symbiosis.serving' has no attribute {name!r}")
    from symbiosis.serving.engine.llm_engine import Engine

    return Engine
