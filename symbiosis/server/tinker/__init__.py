"""Tinker's API: training and sampling for the unmodified SDK. `routes` speaks HTTP, `wire` reads and writes its bytes, `messages` go to the
engine's process, and `service` keeps sessions, runs and samplers there."""
