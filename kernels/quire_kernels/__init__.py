"""Paged KV cache ops, one a file. Import the submodules: only some of them need Triton."""
