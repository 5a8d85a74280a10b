"""Drafters, one per module: the registry finds `DRAFTER` by the module's name."""
