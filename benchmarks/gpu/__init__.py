"""Everything that wants a GPU, in one command: tests, kernels, and decoding with a whole model."""
