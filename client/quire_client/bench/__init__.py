"""Measures a server under load: requests (mix), concurrency (load), servers (targets) and definitions (latency)."""
