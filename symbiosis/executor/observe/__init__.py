"""What operators see: figures, logs, pages."""
