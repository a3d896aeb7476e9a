"""Between the engine's process and the one that speaks HTTP."""
