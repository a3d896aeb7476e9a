"""What operators watch: figures, logs and pages."""
