"""`symbiosis demo`: one executor, two fine-tuning clients and one that generates text, all real processes on this machine."""
