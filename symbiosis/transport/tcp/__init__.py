"""`tcp://`: ZeroMQ, for any host."""
