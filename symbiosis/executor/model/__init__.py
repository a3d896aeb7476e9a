"""The base model that is served: found, loaded, and kept by name."""
