"""What a call is, before it is computed: whether it is right, what it costs, and how it is cut."""
