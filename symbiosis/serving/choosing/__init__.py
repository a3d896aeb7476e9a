"""Which tokens come next."""
