"""One engine over several ranks, each of which computes its part of every layer."""
