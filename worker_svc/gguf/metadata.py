"""The metadata of a GGUF file, and what of the file has not been read: transformers' own reader skips what it does not
know.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from svc_common.preparation import PreparationFailed
from worker_svc.gguf.field_types import wrong_type

# Fields that change nothing, whatever they are.
_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout")
# Of encoders of images, whose tensors a file may have or not: those are refused.
_OF_IMAGES = ("mm.", "vision.")
# Fields that change nothing with one of these values.
_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.shared_kv_layers": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (1,),  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0, 3),  # none, or the last token's state, which is that of decoders anyway
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_SIZES = ("attention.head_count", "block_count", "context_length", "embedding_length")
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Types of tokens: what stands for unknown ones, tokens that texts do not have, and words added to a vocabulary."""
_NEEDED = ("cls_token", "sep_token", "unk_token")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Tokens that end a turn or a message, which llama.cpp knows by their text, whatever the file says of them.
_TURN_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "< EOT >", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<turn|>", "<|tool_response>"),
    *("<|return|>", "<|call|>", "[e~["),
)
# Of vocabularies with these, `<|end|>` ends a message and not a turn.
_ENDS_OF_HARMONY = ("<|return|>", "<|call|>")


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


class GgufMetadata:
    """The metadata of a GGUF file, and which fields and tensors of it have been read.

    Raises PreparationFailed for a file that is one of several of its model, and whatever reads a field that is of
    another type than it must be.
    """

    def __init__(self, gguf: Path, reader: GGUFReader) -> None:
        self.gguf = gguf
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = ""  # until it is known: names of its fields begin with it
        self.architecture = self.needed_text("general.architecture")
        self._read: set[str] = set()
        self._factors: set[str] = set()
        name = _SHARD.search(gguf.name)
        count = self.general("split.count")  # 0 in files that were merged
        parts = int(name[2]) if count is None and name else int(count or 1)
        if parts > 1:
            raise self.refusal(f"it is one of {parts} files of a model; `llama-gguf-split --merge` makes one of them")

    @property
    def num_blocks(self) -> int:
        """Layers, and behind them such as predict further tokens."""
        return int(self.needed("block_count"))

    @property
    def num_layers(self) -> int:
        """Those that the model is computed by."""
        return self.num_blocks - self.num_predicting

    @property
    def num_predicting(self) -> int:
        """The last ones of the blocks, which predict further tokens."""
        return int(self.get("nextn_predict_layers") or 0)

    def general(self, name: str) -> Any:
        """A field of no architecture; None: the file has none."""
        field = self._fields.get(name)
        value = None if field is None else field.contents()
        if isinstance(value, np.generic):
            value = value.item()
        if value is not None and (must_be := wrong_type(name.removeprefix(f"{self.architecture}."), value)) is not None:
            raise self.refusal(f"its metadata {name} must be {must_be}, not {_shown(value)}")
        return value

    def needed_text(self, name: str) -> str:
        """A text of no architecture. Raises PreparationFailed if the file does not have it."""
        if (value := self.general(name)) is None:
            raise self.refusal(f"it has no metadata {name}")
        return str(value)

    def get(self, name: str) -> Any:
        """A field of the architecture, which counts as read; None: the file has none."""
        self._read.add(name)
        return self.peek(name)

    def peek(self, name: str) -> Any:
        """A field of the architecture, which does not count as read. One with equal values for layers is one value."""
        value = self.general(f"{self.architecture}.{name}")
        return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value

    def factors(self, name: str) -> list[float] | None:
        """The numbers of a tensor, which counts as read; None: the file has none."""
        numbers = self.matrix(name)
        return None if numbers is None else numbers.ravel().tolist()

    def matrix(self, name: str) -> NDArray[np.float32] | None:
        """A matrix of numbers [outputs, inputs], which counts as read; None: the file does not have it."""
        self._factors.add(name)
        tensor = self._tensors.get(name)
        return None if tensor is None else dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def ignore_tensor(self, name: str) -> None:
        """Counts a tensor as read that the model does not need."""
        self._factors.add(name)

    def has_tensor(self, pattern: re.Pattern[str]) -> bool:
        """Whether the file has a tensor whose whole name matches."""
        return any(pattern.fullmatch(name) for name in self._tensors)

    def has(self, name: str) -> bool:
        """Whether the file has the tensor of this name."""
        return name in self._tensors

    def num_rows(self, name: str) -> int:
        """Of a matrix. Raises PreparationFailed if the file does not have it."""
        if (tensor := self._tensors.get(name)) is None:
            raise self.refusal(f"it has no tensor {name}")
        return int(tensor.shape[-1])

    def needed(self, name: str) -> Any:
        """As `get`. Raises PreparationFailed if the file does not have the field."""
        if (value := self.get(name)) is None:
            raise self.refusal(f"it has no metadata {self.architecture}.{name}")
        return value

    def check_sizes(self) -> None:
        """Raises PreparationFailed if one of the sizes that every model has is not above 0, or if there are more layers
        than tensors: lists with a part for each could take all memory.
        """
        for name in _SIZES:
            value = self.needed(name)
            if isinstance(value, int) and value < 1:
                raise self.refusal(f"its metadata {self.architecture}.{name} is {value}")
        if self.num_blocks > len(self._tensors):
            raise self.refusal(
                f"its metadata {self.architecture}.block_count is {self.num_blocks}, and it has {len(self._tensors)} "
                "tensors"
            )

    def refusal(self, why: str) -> PreparationFailed:
        """What is raised for this file."""
        return PreparationFailed(f"cannot convert {self.gguf}: {why}")

    def not_read(self, *names: str) -> PreparationFailed:
        """What is raised for fields of the architecture that are not read, or not with their values."""
        fields = ", ".join(
            f"{self.architecture}.{name} = {_shown(self.peek(name))}" for name in names if self._has(name)
        )
        return self.refusal(f"it has metadata that is not read: {fields}")

    def _has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self._fields

    def check_fields_read(self) -> None:
        """Raises PreparationFailed if fields of the architecture have not been read and may change what is computed."""
        prefix = f"{self.architecture}."
        names = [name.removeprefix(prefix) for name in self._fields if name.startswith(prefix)]
        known = {*self._read, *_HARMLESS}
        unread = [
            name
            for name in names
            if name not in known
            and not name.startswith(_OF_IMAGES)
            and self.peek(name) not in _HARMLESS_VALUES.get(name, ())
        ]
        if unread:
            raise self.not_read(*unread)

    def check_tensors_read(self, read: Iterable[str]) -> None:
        """Raises PreparationFailed if the file has tensors other than these and those that were read as factors."""
        unread = sorted(self._tensors.keys() - set(read) - self._factors)
        if unread:
            more = f" and {len(unread) - 8} more" if len(unread) > 8 else ""
            raise self.refusal(f"it has tensors that are not read: {', '.join(unread[:8])}{more}")

    def tokens(self) -> tuple[Sequence[str], Sequence[int]]:
        """The vocabulary, and the types of its tokens. Raises PreparationFailed if the file has none."""
        texts = self.general("tokenizer.ggml.tokens")
        if not texts:
            raise self.refusal("it has no metadata tokenizer.ggml.tokens")
        types = self.general("tokenizer.ggml.token_type") or []
        return texts, types if len(types) == len(texts) else [1] * len(texts)

    def check_tokenizer(self) -> None:
        """Raises PreparationFailed if parts of the tokenizer are missing that transformers reads of every file, or are
        of another type, or a special token is beyond the vocabulary.
        """
        num_tokens = len(self.tokens()[0])
        if self.needed_text("tokenizer.ggml.model") == "gpt2" and self.general("tokenizer.ggml.merges") is None:
            raise self.refusal("it has no metadata tokenizer.ggml.merges")
        for name in ("bos", "eos", "unknown", "padding"):
            if (token := self.token(name)) is not None and token >= num_tokens:
                raise self.refusal(
                    f"its metadata tokenizer.ggml.{name}_token_id is {token}, and it has {num_tokens} tokens"
                )

    def token(self, *names: str) -> int | None:
        """The special token that the first of these fields says that the file has; None: it has none of them."""
        given = (self.general(f"tokenizer.ggml.{name}_token_id") for name in names)
        return next((int(token) for token in given if token is not None), None)

    def special_tokens(self, ids: Mapping[str, int | None], texts: Sequence[str]) -> dict[str, str]:
        """The texts of an encoder's special tokens, by transformers' names. Raises PreparationFailed if one of those in
        `ids` is missing that every text needs.
        """
        found = {name: texts[token] for name, token in ids.items() if token is not None and token < len(texts)}
        if missing := [name for name in _NEEDED if name in ids and name not in found]:
            raise self.refusal(f"its tokenizer has no {', '.join(missing)}")
        return found

    def end_tokens(self) -> list[int]:
        """The tokens that end a text, a turn or a message of it, in this order; empty: the file names none."""
        named = [self.general(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        ends = [int(token) for token in named if token is not None]
        tokens = {text: token for token, text in enumerate(self.general("tokenizer.ggml.tokens") or ())}
        is_harmony = all(text in tokens for text in _ENDS_OF_HARMONY)
        ends += [tokens[text] for text in _TURN_ENDS if text in tokens and not (is_harmony and text == "<|end|>")]
        return list(dict.fromkeys(ends))
