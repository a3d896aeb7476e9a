"""Keys, ownership of files and sockets, digests, keystreams, and limits on how often somebody may do something."""
