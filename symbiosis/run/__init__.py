"""`symbiosis run`: programs that exist, unchanged, on the base model that an executor holds."""
