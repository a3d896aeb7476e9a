"""A weight that is in the executor: what it is to torch, and what PEFT methods do with it."""
