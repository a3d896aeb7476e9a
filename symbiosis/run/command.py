"""`symbiosis run`: starts a program in whose Python processes models share the base that an executor holds."""

import os
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from symbiosis.errors import ConfigError
from symbiosis.run.hook import SWITCH
from symbiosis.run.settings import REQUIRE

SITE = str(Path(__file__).with_name("site"))  # the folder of a `sitecustomize`


def run(command: Sequence[str], endpoint: str | None, require: bool) -> NoReturn:
    """Become the program: its signals and its exit code are its own."""
    environment = environment_of(os.environ, endpoint, require)
    program = program_of(command[0], environment)
    os.execve(program, list(command), environment)


def environment_of(given: Mapping[str, str], endpoint: str | None = None, require: bool = False) -> dict[str, str]:
    """Return the environment of a program that shares. What was on PYTHONPATH stays there.

    >>> environment_of({"PYTHONPATH": "/a"}, "local:///x.sock")["PYTHONPATH"].endswith("site:/a")
    True
    """
    path = given.get("PYTHONPATH")
    told = {SWITCH: "1", "PYTHONPATH": f"{SITE}{os.pathsep}{path}" if path else SITE}
    if endpoint is not None:
        told["SYMBIOSIS_ENDPOINT"] = endpoint
    if require:
        told[REQUIRE] = "1"
    return {**given, **told}


def program_of(name: str, environment: Mapping[str, str]) -> str:
    """Return the file of a command: on the PATH, else among the scripts of this Python, whose environment need not be activated."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which(name, path=os.pathsep.join(filter(None, (environment.get("PATH", os.defpath), scripts))))
    if found is None:
        raise ConfigError(f"there is no command {name!r}: write symbiosis run -- COMMAND ARGUMENTS")
    return found
