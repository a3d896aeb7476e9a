"""`symbiosis cluster`: checks its file, then starts, watches and ends executors, servers and front ends; on this host, or where a backend puts them."""
