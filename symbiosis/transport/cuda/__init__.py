"""`local://` for programs on the executor's GPU or another of its host."""
