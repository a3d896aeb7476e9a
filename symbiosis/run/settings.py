"""What `symbiosis run` tells the processes of a program, by their environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from symbiosis.protocol.endpoints import default_endpoints

REQUIRE, VERDICT = "SYMBIOSIS_RUN_REQUIRE", "SYMBIOSIS_RUN_VERDICT"


@dataclass(frozen=True)
class Settings:
    """How programs share.

    Args:
        endpoint: Where the executor answers; several serve the same model.
        require: Whether a model that is not shared is an error.
        verdict: Of a dry run: the file to which each process that loads a model writes what becomes of it.
    """

    endpoint: tuple[str, ...]
    require: bool = False
    verdict: str = ""


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return what this process was told.

    >>> from_environment({"SYMBIOSIS_RUN_REQUIRE": "1"}).require
    True
    """
    require = environment.get(REQUIRE, "") not in ("", "0")
    return Settings(default_endpoints(), require, environment.get(VERDICT, ""))
