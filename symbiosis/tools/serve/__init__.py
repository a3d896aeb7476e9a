"""`symbiosis serve`: what it needs is checked, then an executor, the engine and the process that speaks HTTP run until SIGTERM."""
