"""Several executors, one a rank, that hold one base model together as one service."""
