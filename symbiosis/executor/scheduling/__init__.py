"""Decides which calls run next, and which run together. Plain Python: no torch."""
