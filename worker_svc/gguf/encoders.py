"""Reads GGUF files of encoders: their configs, and how their hidden states become embeddings."""

import json
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.tensor_writer import PlannedTensor, write_tensors

TYPES, HEAD = "token_types.weight", "cls.output.weight"
_RANK = 4  # the value of `pooling_type` of models with a head
# Values of `pooling_type`, by the names that sentence-transformers has.
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_LABELS = "classifier.output_labels"
_TOKENIZERS = ("bert", "t5")
# The sizes of heads, where a file has them. They are those that follow from other fields.
_WIDTHS = ("attention.key_length", "attention.value_length")
# Numbers of the layers behind the pooling that a file may have, which are without activation.
_DENSE = (2, 3)
_NO_ACTIVATION = "torch.nn.modules.linear.Identity"
_MODULES = "sentence_transformers.models"


def encoder_fields(metadata: GgufMetadata, tokenizers: Collection[str] = _TOKENIZERS) -> dict[str, Any]:
    """What files of all encoders of BERT's form say, as transformers' configs have it. `tokenizers` are the values of
    `tokenizer.ggml.model` that files may have. Raises PreparationFailed for fields that are missing, or have values
    that are not computed.
    """
    metadata.check_sizes()
    needed = metadata.needed
    hidden_size, num_heads = needed("embedding_length"), needed("attention.head_count")
    for name, value in (
        ("attention.causal", False),
        ("attention.head_count_kv", num_heads),
        *((name, hidden_size // num_heads) for name in _WIDTHS),
    ):
        if metadata.get(name) not in (None, value):
            raise metadata.not_read(name)
    if (kind := metadata.general("tokenizer.ggml.model")) not in tokenizers:
        raise metadata.refusal(f"its tokenizer is {kind!r}; those of encoders that are read: {', '.join(tokenizers)}")
    pooling_of(metadata)
    if not metadata.has(HEAD):
        metadata.get(_LABELS)  # of a config that names labels for no head
    return {
        "vocab_size": metadata.num_rows("token_embd.weight"),
        "hidden_size": hidden_size,
        "intermediate_size": needed("feed_forward_length"),
        "num_hidden_layers": metadata.num_blocks,
        "num_attention_heads": num_heads,
        "max_position_embeddings": needed("context_length"),
        "layer_norm_eps": needed("attention.layer_norm_epsilon"),
        "type_vocab_size": metadata.num_rows(TYPES) if metadata.has(TYPES) else 0,
        "pad_token_id": metadata.general("tokenizer.ggml.padding_token_id") or 0,
    }


def has_score_head(metadata: GgufMetadata) -> bool:
    """Whether the model scores pairs of texts or classifies texts. Heads of DistilBERT, whose files are BERT's without
    types of tokens, have another activation, which the file does not say.
    """
    return metadata.has(HEAD) and (metadata.architecture != "bert" or metadata.has(TYPES))


def labels_of(metadata: GgufMetadata) -> dict[int, str]:
    """Of the outputs of a head. Raises PreparationFailed if the file names more or fewer."""
    count, names = metadata.num_rows(HEAD), metadata.get(_LABELS)
    # Several equal values are one.
    names = [names] if isinstance(names, str) else names or [f"LABEL_{number}" for number in range(count)]
    if len(names) != count:
        raise metadata.not_read(_LABELS)
    return dict(enumerate(names))


def pooling_of(metadata: GgufMetadata) -> str | None:
    """How hidden states are pooled; None: the file does not say, or the model has a head. Raises PreparationFailed for
    other ways.
    """
    value = metadata.get("pooling_type") or None
    if has_score_head(metadata) and value in (None, _RANK):
        return None
    if has_score_head(metadata) or (value is not None and value not in _POOLINGS):
        raise metadata.not_read("pooling_type")
    return None if value is None else _POOLINGS[value]


def dense_layers(metadata: GgufMetadata) -> dict[str, NDArray[np.float32]]:
    """The weights of linear layers behind the pooling, by their folders in the order in which they are computed. Raises
    PreparationFailed if their sizes are not those of the metadata.
    """
    layers = {}
    for number in _DENSE:
        name = f"dense_{number}"
        sizes = [metadata.get(f"{name}_feat_{end}") for end in ("out", "in")]
        weight = metadata.matrix(f"{name}.weight")
        if weight is None:
            continue
        if list(weight.shape) != sizes:
            raise metadata.refusal(f"its tensor {name}.weight is {list(weight.shape)}, not {sizes}")
        layers[f"{number}_Dense"] = weight
    return layers


def write_modules(metadata: GgufMetadata, directory: Path) -> None:
    """Writes the files that sentence-transformers has of the pooling, whose vectors are normalised, and of layers
    behind it; none if the file does not say how states are pooled.
    """
    pooling = pooling_of(metadata)
    if pooling is None:
        return
    dense = dense_layers(metadata)
    folders = [
        *(("Transformer", ""), ("Pooling", "1_Pooling"), *(("Dense", folder) for folder in dense)),
        ("Normalize", f"{2 + len(dense)}_Normalize"),
    ]
    modules = [
        {"idx": number, "name": str(number), "path": folder, "type": f"{_MODULES}.{kind}"}
        for number, (kind, folder) in enumerate(folders)
    ]
    _write_json(directory / "modules.json", modules)
    config = {"word_embedding_dimension": metadata.needed("embedding_length"), "pooling_mode": pooling}
    _write_json(directory / "1_Pooling" / "config.json", config)
    for folder, weight in dense.items():
        outputs, inputs = weight.shape
        sizes = {"in_features": inputs, "out_features": outputs, "bias": False}
        _write_json(directory / folder / "config.json", {**sizes, "activation_function": _NO_ACTIVATION})
        numbers = torch.from_numpy(weight)
        planned = PlannedTensor(torch.float32, (outputs, inputs), partial(torch.clone, numbers))
        write_tensors(directory / folder / "model.safetensors", {"linear.weight": planned})


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
