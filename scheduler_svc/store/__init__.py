"""Where requests are kept beyond a scheduler's life, and where schedulers agree on who leads."""
