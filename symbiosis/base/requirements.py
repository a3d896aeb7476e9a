"""Which releases of other packages are needed, said before they fail somewhere inside."""

import importlib.metadata
import re
import sys
from functools import cache

from symbiosis.errors import OutdatedPackage

REQUIREMENT = re.compile(r"([\w.-]+)>=([\d.]+)(?:; *extra == ['\"](\w+)['\"])?")


@cache
def needed(extra: str = "") -> dict[str, str]:
    """Return the least releases that work, of the packages of an extra, as this distribution tells; nothing of one that is not installed."""
    try:
        told = importlib.metadata.requires("symbiosis-llm") or ()
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = [match for each in told if (match := REQUIREMENT.fullmatch(each))]
    return {match[1]: match[2] for match in found if (match[3] or "") == extra}


def check(extra: str = "") -> None:
    """Raise `OutdatedPackage`, which is an `ImportError`, if an installed package is older than what is needed."""
    if found := outdated(extra):
        have = ", ".join(f"{name} {version}" for name, version in found.items())
        least = " ".join(f"'{name}>={needed(extra)[name]}'" for name in found)
        raise OutdatedPackage(
            f"{have} is too old for Symbiosis. Run: {sys.executable} -m pip install --upgrade {least}, and start Python anew"
        )


def check_release(name: str, least: str, what: str) -> None:
    """Raise `OutdatedPackage` if a package that is in no extra is older than what something needs."""
    version = _version_of(name)
    if version and _numbers(version) < _numbers(least):
        raise OutdatedPackage(
            f"{what} needs {name} {least} or later, not {version}. Run: {sys.executable} -m pip install --upgrade '{name}>={least}', and start Python anew"
        )


def outdated(extra: str = "") -> dict[str, str]:
    """Return the packages that are too old, with their versions. One that is not installed as a package is not looked at."""
    least = needed(extra)
    found = {name: _version_of(name) for name in least}
    return {name: version for name, version in found.items() if version and _numbers(version) < _numbers(least[name])}


def _version_of(name: str) -> str:
    """Return the version that is in use: of what is imported already, else of what is installed."""
    if loaded := getattr(sys.modules.get(name.replace("-", "_")), "__version__", ""):
        return str(loaded)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> list[int]:
    """Return the numbers of a release.

    >>> _numbers("5.17.0.dev0"), _numbers("2.13.0+cpu") > _numbers("2.9")
    ([5, 17, 0], True)
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in found[0].split(".")] if found else []
