"""`fuse`: an ordinary PEFT program trains with fewer passes over memory. Modules get a `forward` of their own; parameters and names stay."""
