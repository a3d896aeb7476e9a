"""The daemon that holds frozen weights and answers calls."""
