"""A model directory without weights, as of BERT: a WordPiece tokenizer that adds tokens at both ends of a text, no chat
template, and no end-of-text token."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.processors import PostProcessor

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
UNK, CLS, SEP = 1, 2, 3
WORDS = [*SPECIAL_TOKENS, "hello", "world", "##s", "a", "b", "c", "d"]
CONTEXT_LENGTH = 16


def template_processor() -> PostProcessor:
    """As transformers writes it."""
    return processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )


def bert_processor() -> PostProcessor:
    """As the first files of BERT have it."""
    return processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))


def encoder_tokenizer(post_processor: PostProcessor | None = None) -> Tokenizer:
    """`hello worlds` is [CLS] hello world ##s [SEP]."""
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = post_processor or template_processor()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def ids(text: str) -> list[int]:
    """The tokens of words."""
    return [WORDS.index(word) for word in text.split()]


def make_encoder_directory(path: Path, tokenizer: Tokenizer | None = None, labels: Sequence[str] = ()) -> Path:
    """Writes what a gateway reads of a model, with a head if there are labels, and an empty file for the weights."""
    path.mkdir(parents=True, exist_ok=True)
    stored = tokenizer or encoder_tokenizer()
    stored.enable_truncation(CONTEXT_LENGTH)  # as the files of sentence-transformers have it
    stored.enable_padding(pad_token="[PAD]", length=CONTEXT_LENGTH)
    stored.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    class_name = "BertForSequenceClassification" if labels else "BertModel"
    named = {"id2label": dict(enumerate(labels))} if labels else {}
    (path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": [class_name], **named}))
    (path / "model.safetensors").touch()
    return path
