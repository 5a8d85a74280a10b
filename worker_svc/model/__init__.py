"""Language models over a paged KV cache: the Llama family by our own modules, any other by those of transformers."""
