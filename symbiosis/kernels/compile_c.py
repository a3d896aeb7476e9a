"""Compiles the package's C sources when they are needed."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMPILE_S = 60.0


@contextmanager
def compiled(source: Path, *flags: str) -> Iterator[str]:
    """Compile `source`, and yield the path of the library, to be loaded in the block. Raise `OSError` or `subprocess.SubprocessError`
    without a C compiler that can do that."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/{source.stem}.so"
        command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", *flags, str(source), "-o", library]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
        yield library
