"""Language models over a paged KV cache: described ones by Quire's backends, others by transformers."""
