"""OpenAI's API, in a process of its own: it speaks HTTP, knows text, and asks the engine's process for tokens."""
