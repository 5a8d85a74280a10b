"""What formats of weights cost in quality."""
