"""Attention that programs have for themselves, put into transformers' models by its own interface: over keys and values in the host's memory."""
