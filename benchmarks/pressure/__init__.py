"""Measures what happens when KV memory is short, on the real model: who gives way and how, and who waits for whom."""
