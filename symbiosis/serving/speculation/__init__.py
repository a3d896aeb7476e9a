"""Draft tokens: what may come next in a text is guessed, and checked in one step."""
