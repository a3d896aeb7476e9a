"""Keys and values in pages of one memory, which adapters share."""
