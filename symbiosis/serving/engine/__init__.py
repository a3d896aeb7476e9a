"""The loop of the server, what it counts, and text for its tokens."""
