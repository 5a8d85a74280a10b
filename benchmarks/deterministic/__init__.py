"""What deterministic mode costs."""
