"""Steps on a GPU: what is known of one lies in static tensors, so that it can be a CUDA graph."""
