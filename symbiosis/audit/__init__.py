"""`symbiosis audit`: attacks on what executors see, mounted on a live set-up."""
