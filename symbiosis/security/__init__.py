"""Who is who, whose a file is, and what cannot be guessed or forged."""
