"""How a record of an adapter lies in a GPU's memory: the host writes it, and the kernels of `adapter_rows.py`, which say what is in it, read it."""

MOST_MEMBERS = 4  # layers of a group
SHRINK_HEAD, EXPAND_HEAD = 1, 4  # words of a record before the addresses
RANKS = 16  # that are computed at once
BLOCKS = 4  # of ranks that are computed side by side; further ones follow in turn
IS_WIDE = 1 << 32  # in the first word of a record: its adapter is float32, and the rows are narrower
BEHIND = RANKS * BLOCKS  # words behind a record that may be read
