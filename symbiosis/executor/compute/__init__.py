"""Calls as products."""
