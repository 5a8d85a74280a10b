"""Measures what the journal costs: scheduler, Redis, gRPC and worker are real, only the model sleeps."""
