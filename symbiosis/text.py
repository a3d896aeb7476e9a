"""Text that came from somebody else, made fit to be shown: on a terminal, in a log, in an exception."""

LONGEST = 1024  # characters that are shown of any text
FEW_LETTERS = 200  # ... and of a name


def shown(text: str, longest: int = LONGEST) -> str:
    """`text` without what a terminal would obey, or that would hide what it says: control characters, escapes, line ends, marks that
    turn the direction of writing. What is too long is cut off.

    >>> shown("alice\\x1b[2J")
    'alice?[2J'
    """
    text = text[:longest]
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
