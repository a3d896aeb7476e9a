"""`symbiosis run`: starts a program in whose Python processes models share the base that an executor holds."""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from symbiosis.errors import ConfigError
from symbiosis.protocol.cluster_state import SCHEME
from symbiosis.protocol.endpoints import named_endpoints, parts_of
from symbiosis.run.settings import REQUIRE
from symbiosis.run.switch import SWITCH
from symbiosis.text import shown

SITE = str(Path(__file__).with_name("site"))  # the folder of a `sitecustomize`


def run(command: Sequence[str], endpoint: str | None = None, require: bool = False) -> NoReturn:
    """Become the program: its signals and its exit code are its own."""
    environment = environment_of(os.environ, endpoint, require)
    program = program_of(command, environment)
    try:
        os.execve(program, [program, *command[1:]], environment)
    except OSError as error:
        raise ConfigError(f"{program}: {error.strerror}") from None


def environment_of(given: Mapping[str, str], endpoint: str | None = None, require: bool = False) -> dict[str, str]:
    """Return the environment of a program that shares. What was on PYTHONPATH stays there.

    >>> environment_of({"PYTHONPATH": "/a"}, "local:///x.sock")["PYTHONPATH"].endswith("site:/a")
    True
    """
    path = given.get("PYTHONPATH")
    told = {SWITCH: "1", "PYTHONPATH": f"{SITE}{os.pathsep}{path}" if path else SITE}
    if endpoint is not None:
        if not (urls := named_endpoints(endpoint)):
            raise ConfigError(f"--endpoint {shown(endpoint)!r} names no executor: write its URL")
        for url in urls:
            if not url.startswith(SCHEME):
                parts_of(url)
        told["SYMBIOSIS_ENDPOINT"] = endpoint
    if require:
        told[REQUIRE] = "1"
    return {**given, **told}


def program_of(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the file of a command: on the PATH, else among the scripts of this Python, whose environment need not be activated."""
    places = os.pathsep.join((environment.get("PATH", os.defpath), sysconfig.get_path("scripts")))
    if (found := shutil.which(command[0], path=places)) is None:
        text = f"there is no command {shown(command[0])!r}: write symbiosis run [OPTIONS] -- COMMAND ARGUMENTS"
        raise ConfigError(text)
    flags = flags_of(command)
    probe = [found, *flags, "-c", "import sys; sys.exit('symbiosis.run.hook' not in sys.modules)"]
    if deaf(flags) and subprocess.run(probe, env=environment).returncode:
        raise ConfigError(
            f"{shown(' '.join((*command[:1], *flags)))} does not read PYTHONPATH, so its models would not be shared: leave the flag out, "
            "or (but for -S) install Symbiosis into its environment"
        )
    return found


def flags_of(command: Sequence[str]) -> list[str]:
    """Return what a Python is given before its program; nothing of another command.

    >>> flags_of(["python3", "-W", "error", "-I", "train.py", "-S"])
    ['-W', 'error', '-I']
    """
    if not Path(command[0]).name.startswith("python"):
        return []
    flags: list[str] = []
    for word in command[1:]:
        is_value = flags[-1:] in (["-W"], ["-X"])
        if not is_value and (not word.startswith("-") or word[1:2] in ("c", "m", "")):
            break
        flags.append(word)
    return flags


def deaf(flags: Sequence[str]) -> bool:
    """Whether a Python with these flags does not hear of a `sitecustomize`.

    >>> deaf(["-uI"]), deaf(["-u", "-X", "importtime"])
    (True, False)
    """
    return any(not {"I", "E", "S"}.isdisjoint(word) for word in flags if word.startswith("-") and word[1] not in "-WX")
