"""A tiny random model with a tokenizer and a chat template, for models in the process of a test."""

import json
from pathlib import Path
from typing import Any

from grammars import config_for_grammars
from llama_models import save_servable
from tiny_model import CHAT_TEMPLATE, EOS, tiny_tokenizer

NUM_TOKENS = tiny_tokenizer().get_vocab_size()
SMALL: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "swap_space": 0.001, "max_step_tokens": 32}
"""Settings of a model that loads in a second. A step computes two blocks of tokens."""


def save_offline_model(directory: Path) -> Path:
    """Writes the model, with an end-of-text token. It has a context of 256 tokens."""
    save_servable(directory, config_for_grammars(), tiny_tokenizer())
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    return directory
