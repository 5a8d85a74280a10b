"""Ops over the paged KV cache, one per file. Import the submodules: only some of them need Triton."""
