"""Language models over a paged KV cache: described ones by our own backends, others by transformers."""
