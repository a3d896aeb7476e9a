"""The base model that is served: finds it, loads it, and keeps its tensors by name."""
