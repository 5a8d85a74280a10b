"""Measures a server under load: what is sent (mix), by whom (load), to what (targets), and what it means (latency)."""
