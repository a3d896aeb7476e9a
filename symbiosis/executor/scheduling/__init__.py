"""Which calls run next, and together. Plain Python: no torch."""
