"""The allocator of captured steps' memory: it compiles, and where there is no GPU it has none to give."""

import ctypes
import ctypes.util
import shutil

import pytest

from symbiosis.kernels import compile_c
from symbiosis.kernels.gpu import shareable_memory

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_it_compiles_without_a_warning_and_asks_a_driver_that_is_there() -> None:
    with compile_c.compiled(shareable_memory.SOURCE, *shareable_memory.FLAGS, "-Wall", "-Wextra", "-Werror") as library:
        allocator = ctypes.CDLL(library)
    allocator.take.restype = ctypes.c_void_p
    allocator.take.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    assert allocator.give
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert allocator.take(2 << 20, 0, None) is None


def test_without_a_compiler_steps_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    shareable_memory._allocator.cache_clear()
    assert shareable_memory.new_pool() is None
    shareable_memory._allocator.cache_clear()
