"""The proxies of frozen layers, and the choice of layers that get one."""
