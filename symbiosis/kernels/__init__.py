"""The arithmetic of the executor, one operation per file. Imports torch only, and Triton where that is needed."""

from functools import cache
from importlib import import_module
from typing import Any


@cache
def with_triton(name: str) -> Any:
    """The module of that name here (`gpu.doorbell`); nothing where there is no Triton."""
    try:
        return import_module(f"{__name__}.{name}")
    except ImportError:
        return None
