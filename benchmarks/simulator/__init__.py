"""Drives the real scheduler core with modelled workers, so that a policy is judged without a model."""
