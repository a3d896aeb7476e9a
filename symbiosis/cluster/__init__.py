"""Many machines: which server a request goes to, when servers are added and given back, and the address that stands for all of them."""
