"""`tcp://` for programs on a GPU of another host: rows go by NCCL."""
