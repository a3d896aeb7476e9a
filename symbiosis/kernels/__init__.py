"""The arithmetic of the executor, one operation per file. Imports torch only, and Triton where that is needed."""

from functools import cache
from importlib import import_module
from typing import Any

from symbiosis.base.folders import check_caches


@cache
def with_triton(name: str) -> Any:
    """Return the module of this package with that name (`gpu.doorbell`), or None without Triton."""
    try:
        module = import_module(f"{__name__}.{name}")
    except ImportError:
        return None
    check_caches()  # Triton compiles when a kernel first runs
    return module
