"""Compiles the package's C sources when they are needed, and keeps what was compiled for the next process."""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from symbiosis.base.folders import Use, temporary_folder, user_folder
from symbiosis.errors import ConfigError

logger = logging.getLogger("symbiosis")
COMPILE_S = 60.0
# These flags allow other orders of summing, but do not change how the rest of the process computes, as -ffast-math does.
FAST = ("-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fopenmp")
ABOUT_CPU = ("model name", "flags", "Features")  # of /proc/cpuinfo: what code for this very processor depends on


def load(source: Path, *flags: str, **functions: tuple[Sequence[Any], Any]) -> ctypes.CDLL | None:
    """Compile and load `source`, and declare its functions: the types of each one's arguments, and of its result. Return None without a C
    compiler that can do that."""
    try:
        with compiled(source, *flags) as path:
            library = ctypes.CDLL(path)
    except ConfigError as error:
        logger.warning("%s is not compiled, and what it does takes longer: %s", source.name, error)
        return None
    except (OSError, subprocess.SubprocessError):
        return None
    for name, (arguments, result) in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


@contextmanager
def compiled(source: Path, *flags: str) -> Iterator[str]:
    """Compile `source`, and yield the path of the library, to be loaded in the block. Raise `OSError` or `subprocess.SubprocessError`
    without a C compiler that can do that, and `ConfigError` if there is no folder for that which others cannot change.

    A library that was compiled from the same, by the same compiler for the same processor, is used again: it lies in this user's own folder.
    """
    kept = _place(source, flags)
    if kept is None:
        with temporary_folder() as folder:
            yield _compile(source, flags, folder)
        return
    if not kept.is_file():
        with temporary_folder(within=kept.parent) as folder:
            Path(_compile(source, flags, folder)).replace(kept)
    try:
        yield str(kept)
    except OSError:  # it is damaged
        kept.unlink(missing_ok=True)
        raise


def _compile(source: Path, flags: tuple[str, ...], folder: Path) -> str:
    library = f"{folder}/{source.stem}.so"
    command = [_compiler(), "-shared", "-fPIC", *flags, str(source), "-o", library]
    environment = {**os.environ, Use.TEMPORARY: str(folder)}  # for what passes between the compiler and the assembler
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=COMPILE_S)
    return library


def _compiler() -> str:
    return os.environ.get("CC", "cc")


def _place(source: Path, flags: tuple[str, ...]) -> Path | None:
    """Return where the library is kept, or None if no folder is this user's alone, or there is no compiler."""
    compiler = shutil.which(_compiler())
    if compiler is None:
        return None
    try:
        folder = user_folder(Use.CACHE, "kernels", make=True)
        about = Path(compiler).stat()
    except (ConfigError, OSError):
        return None
    told = source.read_bytes(), *flags, compiler, about.st_size, about.st_mtime_ns, platform.machine(), _processor()
    return folder / f"{source.stem}-{blake2b(repr(told).encode(), digest_size=16).hexdigest()}.so"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(ABOUT_CPU))
