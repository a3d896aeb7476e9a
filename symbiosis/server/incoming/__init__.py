"""What clients send: bodies of requests, and adapters."""
