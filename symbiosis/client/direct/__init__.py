"""Products that a client makes by itself, with weights that it has mapped from the executor's memory."""
