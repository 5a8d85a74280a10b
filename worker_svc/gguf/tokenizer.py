"""Writes the tokenizer of a GGUF file: as transformers makes it, and with what it does not read of the file."""

from pathlib import Path
from typing import Any

from svc_common.preparation import Report
from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.gguf.text_splits import split_texts
from worker_svc.gguf.unigram import make_unigram
from worker_svc.gguf.wordpiece import has_lost_capitals, make_wordpiece

# How tokenizers of encoders are made, by `tokenizer.ggml.model`.
_OF_ENCODERS = {"bert": make_wordpiece, "t5": make_unigram}
# Ways to split texts, of vocabularies of bytes by their kind, in which spaces are written as in sentencepiece.
_NOT_OF_BYTES = ("granite-embed-multi-311m", "sarvam-moe")


def write_tokenizer(
    metadata: GgufMetadata, directory: Path, report: Report, *, needs_config: bool = False, frames_pairs: bool = False
) -> None:
    """Writes tokenizer.json and tokenizer_config.json. Reports a way to split texts that is not known.

    `needs_config`: whether transformers is to make the tokenizer of the class that its config of the file names. It
    knows few architectures. `frames_pairs`: as `GgufArchitecture` has it. Raises PreparationFailed for a tokenizer that
    is not read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_SENTENCEPIECE_BUILDERS

    kind: Any = AutoTokenizer if needs_config else PreTrainedTokenizerFast
    model, pre = (metadata.general(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if pre in _NOT_OF_BYTES:
        raise metadata.refusal(f"its tokenizer is not read: tokenizer.ggml.pre = {pre}")
    if model == "bert" and has_lost_capitals(metadata):
        report(
            "the tokenizer of the GGUF file has words with capitals, and nothing says that texts keep theirs "
            "(tokenizer.ggml.normalizer.lowercase): they are put in lower case, as llama.cpp does. If the model was "
            "trained with capitals, convert it again, or name its tokenizer by QUIRE_TOKENIZER"
        )
    if model in _OF_ENCODERS:
        backend, special = _OF_ENCODERS[model](metadata)
        limit = metadata.needed("context_length")
        kind(tokenizer_object=backend, model_max_length=limit, **special).save_pretrained(directory)
        return
    metadata.check_tokenizer()
    # transformers does not know that this vocabulary has its merges in the order of Gemma's.
    GGUF_SENTENCEPIECE_BUILDERS.setdefault("gemma-embedding", GGUF_SENTENCEPIECE_BUILDERS["gemma3"])
    tokenizer = kind.from_pretrained(metadata.gguf.parent, gguf_file=metadata.gguf.name)
    _leave_out_prefix(tokenizer.backend_tokenizer, metadata)
    if model == "gpt2":
        split_texts(tokenizer.backend_tokenizer, pre, report)
    if frames_pairs:
        _frame_pairs(tokenizer, metadata)
    tokenizer.save_pretrained(directory)


def _leave_out_prefix(backend: Any, metadata: GgufMetadata) -> None:
    """Obeys the field that says that no space is added before a text."""
    from tokenizers import decoders, pre_tokenizers

    has_prefix = metadata.general("tokenizer.ggml.add_space_prefix") is not False
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace) and not has_prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _frame_pairs(tokenizer: Any, metadata: GgufMetadata) -> None:
    """Has the tokenizer of an encoder frame texts and pairs of texts as BERT's does."""
    from tokenizers import processors

    texts, _ = metadata.tokens()
    ids = {
        "cls_token": metadata.token("bos", "cls"),
        "sep_token": metadata.token("seperator", "eos"),
        "mask_token": metadata.token("mask"),
    }
    special = metadata.special_tokens(ids, texts)
    tokenizer.add_special_tokens(special)
    first, last = special["cls_token"], special["sep_token"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B {last}",
        special_tokens=[(first, ids["cls_token"]), (last, ids["sep_token"])],
    )
