"""The link between the engine's process and the one that speaks HTTP."""
