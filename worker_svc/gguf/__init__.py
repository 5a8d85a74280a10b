"""Reads GGUF files: their metadata, tensors and tokenizers, into the directory of a model."""
