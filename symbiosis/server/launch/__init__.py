"""`symbiosis serve`: checks what it needs, then runs an executor, the engine and the process that speaks HTTP until SIGTERM."""
