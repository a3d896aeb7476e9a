"""The devices that users name."""

from symbiosis.errors import ConfigError

LAST_GPU = 255


def gpus_of(text: str) -> tuple[int, ...]:
    """Return the numbers of the GPUs in a text.

    >>> gpus_of("0-2,5")
    (0, 1, 2, 5)
    """
    found: list[int] = []
    for part in text.split(","):
        first, mark, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or not (last.isdecimal() if mark else not last) or int(last or first) > LAST_GPU:
            raise ConfigError(f"devices {text!r}: write the numbers of GPUs, as 0-3 or 0,2, or cpu")
        found += range(int(first), int(last or first) + 1)
    if len(set(found)) < len(found) or not found:
        raise ConfigError(
            f"devices {text!r}: name each GPU once, the lower number of a range first (ranks on one GPU: --ranks)"
        )
    return tuple(found)
