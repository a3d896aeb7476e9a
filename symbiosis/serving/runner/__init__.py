"""Runs the steps of a model: over pages or one by one, and on a GPU as a CUDA graph, for which all that is known of a step lies in static tensors."""
