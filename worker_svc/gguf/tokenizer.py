"""Writes the tokenizer of a GGUF file: as transformers makes it, and with what it does not read of the file."""

from pathlib import Path
from typing import Any

from svc_common.preparation import Report
from worker_svc.gguf.metadata import GgufMetadata

# How texts are split before merges, by the names that llama.cpp has for it and transformers does not know: each digit
# alone and then as GPT-2 does, as GPT-2 does (SmolLM's digits are alone, too, but no token of its has two), and as with
# another name, which transformers knows.
_DIGITS_ALONE = ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_GPT2 = ("gpt-2", "smollm", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
_LIKE = {"stablelm2": "qwen2", "glm4": "llama-bpe", "chatglm-bpe": "llama-bpe"}


def write_tokenizer(metadata: GgufMetadata, directory: Path, report: Report, *, needs_config: bool = False) -> None:
    """Writes tokenizer.json and tokenizer_config.json. Reports a way to split texts that is not known.

    `needs_config`: whether transformers is to make the tokenizer of the class that its config of the file names. It
    knows few architectures.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind: Any = AutoTokenizer if needs_config else PreTrainedTokenizerFast
    tokenizer = kind.from_pretrained(metadata.gguf.parent, gguf_file=metadata.gguf.name)
    _leave_out_prefix(tokenizer.backend_tokenizer, metadata)
    if metadata.general("tokenizer.ggml.model") == "gpt2":
        _split_texts(tokenizer.backend_tokenizer, metadata.general("tokenizer.ggml.pre"), report)
    tokenizer.save_pretrained(directory)


def _leave_out_prefix(backend: Any, metadata: GgufMetadata) -> None:
    """Obeys the field that says that no space is added before a text."""
    from tokenizers import decoders, pre_tokenizers

    has_prefix = metadata.general("tokenizer.ggml.add_space_prefix") is not False
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace) and not has_prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _split_texts(backend: Any, name: str | None, report: Report) -> None:
    """Splits texts as a vocabulary of bytes was trained, where transformers does not: it splits as GPT-2 does."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    splits: dict[str, str] = GGUF_PRE_TOKENIZER_SPLITS
    if name in splits or name in _AS_GPT2:
        return
    if name in _DIGITS_ALONE:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif name in _LIKE:
        split = pre_tokenizers.Split(Regex(splits[_LIKE[name]]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        says = "does not say how it splits texts" if name is None else f"splits texts as {name!r}, which is not known"
        report(
            f"the tokenizer of the GGUF file {says} (tokenizer.ggml.pre): they are split as GPT-2's tokenizer does, "
            "and some get other tokens than in training. QUIRE_TOKENIZER names the tokenizer to use instead"
        )
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
