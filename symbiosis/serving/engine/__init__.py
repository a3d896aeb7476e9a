"""The server's loop, what it counts, and text for its tokens."""
