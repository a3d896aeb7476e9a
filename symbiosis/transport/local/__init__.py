"""`local://`: a Unix socket and shared memory, for programs of one host."""
