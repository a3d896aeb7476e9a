"""Decides which sequences run in the next step."""
