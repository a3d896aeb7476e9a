"""Files of secrets, as their owners have to keep them."""

from pathlib import Path


def write_secret(path: Path, text: str) -> Path:
    """Write a file that nobody else can read, or write one anew."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path
