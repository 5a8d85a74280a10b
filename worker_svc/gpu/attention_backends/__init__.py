"""Attention backends of a GPU, one per module: the registry finds `BACKEND` by the module's name."""
