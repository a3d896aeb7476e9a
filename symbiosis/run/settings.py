"""What `symbiosis run` tells the processes of a program, by their environment."""

import os
from dataclasses import dataclass

REQUIRE, VERDICT = "SYMBIOSIS_RUN_REQUIRE", "SYMBIOSIS_RUN_VERDICT"


@dataclass(frozen=True)
class Settings:
    """How a program shares.

    Args:
        require: Whether a model that is not shared is an error.
        verdict: Of a dry run: the file to which processes write what becomes of the models that they load.
    """

    require: bool = False
    verdict: str = ""

    @property
    def endpoint(self) -> tuple[str, ...]:
        """Where the executor answers; several serve the same model."""
        from symbiosis.protocol.endpoints import default_endpoints

        return default_endpoints()


def from_environment() -> Settings:
    """Return what this process was told.

    >>> from_environment().require
    False
    """
    return Settings(os.environ.get(REQUIRE, "") not in ("", "0"), os.environ.get(VERDICT, ""))
