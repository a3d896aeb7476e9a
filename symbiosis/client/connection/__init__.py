"""A connection that lasts: joined again when it is lost, shared by threads, kept alive."""
