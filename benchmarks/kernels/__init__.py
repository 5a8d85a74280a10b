"""Each op beside its peers on the same tensors, and beside what the device itself can do."""
