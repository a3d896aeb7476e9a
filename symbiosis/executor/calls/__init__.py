"""What happens to a call before it is computed: it is validated, priced and cut."""
