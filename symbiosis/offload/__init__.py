"""Attention over keys and values that lie in the host's memory, put into transformers' models by transformers' own interface."""
