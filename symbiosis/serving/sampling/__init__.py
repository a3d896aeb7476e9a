"""Chooses the next tokens."""
