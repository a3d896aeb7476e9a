"""Computes calls as matrix products, alone or several together."""
