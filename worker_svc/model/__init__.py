"""Native language models of the Llama family over a paged KV cache."""
