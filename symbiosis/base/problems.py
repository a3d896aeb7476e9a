"""What checks find. One of options raises `ConfigError`, of one line or several, so that all that is wrong is said at once; one of
`symbiosis doctor` returns a `Finding`."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from symbiosis.errors import ConfigError


class Finding(NamedTuple):
    """A line of `symbiosis doctor`: how bad it is, what was looked at, what was found, and what to do about it."""

    state: Literal["ok", "warn", "FAIL"]
    name: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<4}  {self.name:<16}  {self.text}"
        return f"{line}. {self.remedy}" if self.remedy else line


def problems_of(checks: Iterable[Callable[..., object]], *given: object) -> list[str]:
    """Return the lines of all checks, each line once."""
    found: dict[str, None] = {}
    for check in checks:
        try:
            check(*given)
        except ConfigError as error:
            found |= dict.fromkeys(str(error).splitlines())
    return list(found)


def refuse(problems: Iterable[str]) -> None:
    """Raise `ConfigError` with these lines, if there are any."""
    if text := "\n".join(problems):
        raise ConfigError(text)
