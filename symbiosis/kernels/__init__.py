"""The arithmetic of the executor, one operation per file. Imports torch only."""
