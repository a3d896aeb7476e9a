"""Text that came from somebody else, made fit to be shown: on a terminal, in a log, in an exception."""

LONGEST = 1024  # characters that are shown of any text


def shown(text: str, longest: int = LONGEST) -> str:
    """`text` without what a terminal would obey, or that would hide what it says: control characters, escapes, line ends, marks that
    turn the direction of writing. Each is written out instead; what is too long is cut off.

    >>> shown("alice\\x1b[2J")
    'alice\\\\x1b[2J'
    """
    if not text.isprintable():
        text = "".join(char if char.isprintable() else _written_out(char) for char in text[:longest])
    return text[:longest]


def _written_out(char: str) -> str:
    return " " if char in "\n\t" else ascii(char)[1:-1]
