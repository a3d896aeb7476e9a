"""Adapters of all kinds on one base: read and checked, put where they act, and brought to the device when they are needed."""
