"""Encoders: models that turn a whole prompt into one vector, in one step and without KV."""
