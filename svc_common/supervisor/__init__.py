"""Runs every role of Quire on one machine: `python -m svc_common.supervisor`, which is what `make run` does."""
