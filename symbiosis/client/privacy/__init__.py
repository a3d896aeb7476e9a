"""The levels of privacy, and the proof that answers are right."""
