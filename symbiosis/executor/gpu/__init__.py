"""Calls of GPU clients: answered without a CPU where the GPU can do it by itself."""
