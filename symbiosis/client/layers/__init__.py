"""What stands in the place of frozen layers, and which layers those are."""
