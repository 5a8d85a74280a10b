"""A model directory without weights: a small byte-level tokenizer and its chat template, created in milliseconds."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
CONTEXT_LENGTH = 256

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] == 'tool' -%}{{ raise_exception('no tools here: ' + message['content']) }}{%- endif -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# Also a character in two halves, and a token that ends one character and starts the next.
_MERGES = [
    ("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"),
    ("Ġ", "w"), ("o", "r"), ("l", "d"), ("Ġw", "or"), ("Ġwor", "ld"),
    ("ä", "½"), ("ł", "å"),
]  # fmt: skip


def tiny_tokenizer() -> Tokenizer:
    """Special tokens 0 to 2, the 256 bytes, then a few merges. `hello world` is two tokens."""
    return _byte_level(sorted(pre_tokenizers.ByteLevel.alphabet()), _MERGES)


def other_tokenizer() -> Tokenizer:
    """A token for each byte, in another order than in the tiny tokenizer."""
    return _byte_level(sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True), [])


def _byte_level(alphabet: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    vocab = {token: place for place, token in enumerate(SPECIAL_TOKENS)}
    for piece in (*alphabet, *("".join(merge) for merge in merges)):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_model_directory(path: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Writes what a gateway reads, and an empty file where the weights would be."""
    path.mkdir(parents=True, exist_ok=True)
    (tokenizer or tiny_tokenizer()).save(str(path / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    (path / "model.safetensors").touch()
    return path
