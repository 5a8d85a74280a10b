"""Batches: requests of a file in OpenAI's batch format, each answered by exactly one line of another file."""
