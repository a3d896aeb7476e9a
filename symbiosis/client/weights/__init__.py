"""A weight that lies in the executor: how it behaves in torch, and in PEFT's methods."""
