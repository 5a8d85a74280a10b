"""Encoders: models that turn a whole prompt into one value, in one step and without KV."""
