"""Which build this is: the release, and the commit that it was made of. (`setup.py` asks this file by itself, so it imports nothing of ours.)"""

import re
from functools import cache
from pathlib import Path

# What git fills in when it packs a commit, and `setup.py` in a wheel or a source distribution. In a checkout it is a pattern.
STAMP = Path(__file__).with_name("commit.txt")
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
DIGITS = 12


@cache
def build() -> str:
    """Return the release with the commit, as far as it is known: `0.1.0+g80d877880d87`."""
    from symbiosis import __version__

    found = commit()
    return f"{__version__}+g{found[:DIGITS]}" if found else __version__


def labels(protocol: int) -> dict[str, str]:
    """Return what a metric tells of this build. `protocol` is the number of what goes between clients and executors."""
    from symbiosis import __version__

    return {"version": __version__, "commit": commit()[:DIGITS], "protocol": str(protocol)}


@cache
def commit() -> str:
    """Return the commit that this build was made of, or "" if nobody can tell."""
    try:
        stamped = STAMP.read_text().strip()
    except OSError:
        stamped = ""
    return stamped if COMMIT.fullmatch(stamped) else checked_out(STAMP.parents[1])


def checked_out(folder: Path) -> str:
    """Return the commit that is checked out in a folder of ours, or "". Git itself may not be there, or not trust the folder's owner."""
    try:
        if "symbiosis-llm" not in (folder / "pyproject.toml").read_text():
            return ""
        git = folder / ".git"
        if git.is_file():  # one of several working trees
            git = folder / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        found = _of_branch(head.removeprefix("ref:").strip(), git, shared) if head.startswith("ref:") else head
    except (OSError, UnicodeDecodeError):
        return ""
    return found if COMMIT.fullmatch(found) else ""


def _of_branch(name: str, *folders: Path) -> str:
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).read_text().strip()
    packed = (line.partition(" ") for line in (folders[-1] / "packed-refs").read_text().splitlines())
    return next((found for found, _, branch in packed if branch == name), "")


commit()  # now: what is checked out may change while a process runs
