"""The front end: one address that speaks the API of `symbiosis serve` for all servers of a cluster."""
