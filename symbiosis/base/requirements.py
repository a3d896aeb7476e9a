"""Which releases of other packages are needed, said before they fail somewhere inside."""

import importlib.metadata
import re
import sys

from symbiosis.errors import OutdatedPackage

# The least that works, by extra, as in pyproject.toml.
NEEDED: dict[str, dict[str, str]] = {
    "": {
        "accelerate": "1.10",
        "cryptography": "42.0",
        "huggingface-hub": "1.0",
        "msgspec": "0.19",
        "numpy": "2.0",
        "peft": "0.21",
        "prometheus-client": "0.20",
        "pyyaml": "6.0",
        "pyzmq": "26.0",
        "rich": "13.0",
        "safetensors": "0.5",
        "torch": "2.11",
        "transformers": "5.17",
        "typer": "0.12",
        "typing-extensions": "4.10",
    },
    "ray": {"ray": "2.40"},
    "serve": {"httptools": "0.6", "jinja2": "3.1", "starlette": "0.40", "uvicorn": "0.30"},
    "structured": {"llguidance": "1.0"},
}


def check(extra: str = "") -> None:
    """Raise `OutdatedPackage`, which is an `ImportError`, if an installed package is older than what is needed."""
    if found := outdated(extra):
        have = ", ".join(f"{name} {version}" for name, version in found.items())
        least = " ".join(f"'{name}>={NEEDED[extra][name]}'" for name in found)
        raise OutdatedPackage(
            f"{have} is too old for Symbiosis. Run: {sys.executable} -m pip install --upgrade {least}, and start Python anew"
        )


def outdated(extra: str = "") -> dict[str, str]:
    """Return the packages that are too old, with their versions. One that is not installed as a package is not looked at."""
    least = NEEDED[extra]
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
