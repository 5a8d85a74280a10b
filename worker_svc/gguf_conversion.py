"""Writes the model of a GGUF file into a directory, with its blocks of codes as they are, or dequantized."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    dequantize,
    get_tensor_name_map,
)
from numpy.typing import NDArray
from torch import Tensor

from svc_common.preparation import PreparationFailed, Report
from worker_svc.gguf_config import read_config
from worker_svc.gguf_metadata import GgufMetadata
from worker_svc.gguf_tokenizer import write_tokenizer
from worker_svc.model.architecture import describe
from worker_svc.model.description import ModelDescription
from worker_svc.model.formats._gguf_blocks import BLOCK_TYPES
from worker_svc.model.formats.gguf import BLOCKS, METHOD
from worker_svc.progress import progress
from worker_svc.tensor_writer import PlannedTensor, write_tensors

# Architectures of GGUF whose matrices are those of transformers, but for the order of rows. Others are dequantized.
_LIKE_TRANSFORMERS = ("gemma2", "gemma3", "gemma4", "llama", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_WEIGHT = ".weight"
# Of Gemma 4: what tensors whose names do not end as others' are called behind the name of a layer.
_ENDINGS = {
    ".layer_scalar": ".layer_output_scale.weight",
    ".router.scale": ".ffn_gate_inp.scale",
    ".router.per_expert_scale": ".ffn_down_exps.scale",
}
_GATE_OR_UP = re.compile(r"\.experts\.(gate|up)_proj$")


@dataclass(frozen=True, slots=True)
class GgufConversion:
    """Writes the model of a GGUF file into an existing directory: config, tokenizer and safetensors."""

    gguf: Path
    directory: Path
    report: Report

    def run(self, *, keeps_blocks: bool) -> None:
        """See `worker_svc.prepare.convert_gguf`."""
        # Quire reports the progress itself. tqdm reads this when transformers imports it.
        os.environ.setdefault("TQDM_DISABLE", "1")
        try:
            with progress(f"converting {self.gguf.name}", self.report):
                self._write(keeps_blocks=keeps_blocks)
        except PreparationFailed:
            raise
        except Exception as error:  # gguf's reader has no error type of its own
            raise PreparationFailed(f"cannot convert {self.gguf}: {error}") from error

    def _write(self, *, keeps_blocks: bool) -> None:
        reader = _open(self.gguf)
        metadata = GgufMetadata(self.gguf, reader)
        config = read_config(metadata)
        description = None
        if keeps_blocks and metadata.architecture in _LIKE_TRANSFORMERS:
            config.architectures = [_class_of(config)]
            description = describe(config)
        if description is None:  # or it is not computed natively
            _dequantize(metadata, config, self.directory)
        else:
            self._keep_blocks(reader, metadata, config, description)
        write_tokenizer(metadata, self.directory, self.report)

    def _keep_blocks(
        self, reader: GGUFReader, metadata: GgufMetadata, config: Any, description: ModelDescription
    ) -> None:
        plan = _Plan(reader, metadata.architecture, config, description)
        tensors = dict(plan.tensors())
        metadata.check_tensors_read(plan.read)
        if plan.dequantized:
            names = ", ".join(f"{count} of {name}" for name, count in sorted(plan.dequantized.items()))
            self.report(f"tensors that are dequantized: {names}; {', '.join(BLOCK_TYPES)} stay as they are")
        write_tensors(self.directory / "model.safetensors", tensors)
        _write_config(config, metadata, self.directory, plan.types)


def _open(gguf: Path) -> GGUFReader:
    try:
        return GGUFReader(gguf)
    except Exception as error:  # it has no error type of its own, and reads beyond the end of a file
        raise PreparationFailed(f"{gguf} is damaged or not complete: {error}") from error


def _dequantize(metadata: GgufMetadata, config: Any, directory: Path) -> None:
    """Writes all weights in float32: no smaller type represents those of quantized ones exactly."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    gguf = metadata.gguf
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, config=config, dtype=torch.float32, output_loading_info=True
    )
    model, loading = loaded
    # transformers makes up what is missing: biases are zeros, and other tensors random numbers.
    if missing := sorted(name for name in loading["missing_keys"] if not _is_zero(name, config)):
        raise metadata.refusal(f"it has no tensors for {', '.join(missing[:8])}")
    metadata.check_tensors_read(_read_by_transformers(model, metadata.architecture))
    # A model loaded from GGUF rejects save_pretrained, and its config would name GGUF again.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes it readable for its owner only
    _write_config(model.config, metadata, directory, {})


def _read_by_transformers(model: Any, architecture: str) -> Iterable[str]:
    """The names of the tensors in a GGUF file that transformers reads for a model."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor: Callable[..., Any] = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    names_in: Callable[..., dict[str, str]] = get_gguf_hf_weights_map
    names = names_in(model, processor(config=model.config.to_dict()))
    # Those of experts are without the ending.
    return {*names, *(f"{name}{_WEIGHT}" for name in names)}


def _class_of(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    return name


def _is_zero(name: str, config: Any) -> bool:
    """Whether a tensor that a file does not have is a bias beside others: llama.cpp has them one by one, and
    transformers for all layers of a kind.
    """
    part = "mlp_bias" if ".mlp." in name else "attention_bias"
    return name.endswith(".bias") and bool(getattr(config, part, False))


def _write_config(config: Any, metadata: GgufMetadata, directory: Path, types: Mapping[str, str]) -> None:
    from transformers import GenerationConfig

    config.save_pretrained(directory)
    generation = GenerationConfig.from_model_config(config)
    ends = metadata.end_tokens()
    if len(ends) > 1:
        generation.eos_token_id = ends
    elif ends:
        generation.eos_token_id = ends[0]
    generation.save_pretrained(directory)
    path = directory / "config.json"
    written = json.loads(path.read_text())
    written.pop("quantization_config", None)
    if types:
        written["quantization_config"] = {"quant_method": METHOD, "types": dict(types)}
    path.write_text(json.dumps(written, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class _Change:
    """What distinguishes a tensor of GGUF from the one of transformers."""

    heads: int | None = None
    """Rows of each of so many heads are in the order of llama.cpp: both halves of a rotated pair are neighbours."""
    less: float = 0.0

    def __call__(self, data: NDArray[Any]) -> NDArray[Any]:
        if self.heads is not None:
            pairs = data.reshape(self.heads, -1, 2, *data.shape[1:])
            data = pairs.swapaxes(1, 2).reshape(data.shape)
        return data - np.float32(self.less) if self.less else data


class _Plan:
    """The tensors of a model directory, made of those of a GGUF file when they are written."""

    def __init__(self, reader: GGUFReader, architecture: str, config: Any, description: ModelDescription) -> None:
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        self._architecture, self._config, self._description = architecture, config, description
        by_name = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        self._names = get_tensor_name_map(by_name[architecture], len(description.layers))
        self.types: dict[str, str] = {}
        """The types of layers in blocks."""
        self.dequantized: Counter[str] = Counter()
        """How many tensors of a type are dequantized."""
        self.read: set[str] = set()
        """The tensors of the file that are part of the model."""

    def tensors(self) -> Iterator[tuple[str, PlannedTensor]]:
        """By their names. Raises PreparationFailed if one is missing, has another shape, or cannot be read."""
        description = self._description
        # Of layers that share keys and values, a file may have such tensors all the same.
        unused = (self._names.get_name(prefix.removesuffix(".")) for prefix in description.unused_prefixes)
        self.read |= {f"{name}{_WEIGHT}" for name in unused if name is not None}
        inputs = description.layer_inputs
        tables = {description.embedding, *(() if inputs is None else (inputs.embedding,))}
        for name, shape in description.shapes.items():
            yield self._planned(name, shape, may_have_blocks=name in tables)
        for layer in description.linear_layers:
            if layer is description.head and description.tied_embeddings:
                continue
            for stored in layer.stored:
                yield self._planned(
                    f"{stored.name}{_WEIGHT}", (sum(stored.outputs), layer.inputs), may_have_blocks=True
                )
                if stored.bias:
                    yield self._planned(f"{stored.name}.bias", (sum(stored.outputs),), may_have_blocks=False)

    def _planned(self, name: str, shape: tuple[int, ...], *, may_have_blocks: bool) -> tuple[str, PlannedTensor]:
        expert = _EXPERT.search(name)
        in_file, part = self._place_of(_EXPERT.sub(".experts.", name))
        stored = self._stored.get(in_file)
        self.read.add(in_file)
        if stored is None:
            if _is_zero(name, self._config):
                return name, PlannedTensor(torch.float32, shape, partial(torch.zeros, shape))
            raise PreparationFailed(f"the GGUF file has no tensor {in_file}, which is {name}")
        found = tuple(reversed([int(size) for size in stored.shape]))
        number = None if expert is None else int(expert[1])
        of_one = found if number is None else found[1:]
        rows = slice(None)
        if part is not None:
            half = of_one[0] // 2
            rows, of_one = slice(part * half, (part + 1) * half), (half, *of_one[1:])
        # A vector may stand for a matrix of one row.
        if of_one != shape and (1, *of_one) != shape:
            raise PreparationFailed(f"the tensor {in_file} of the GGUF file is {list(of_one)}, not {list(shape)}")
        change, type_name = self._change(in_file), stored.tensor_type.name
        read = partial(_read, stored, number, rows, change)
        if type_name in BLOCK_TYPES and may_have_blocks:
            of = BLOCK_TYPES[type_name]
            self.types[name.removesuffix(_WEIGHT)] = type_name
            blocks = (shape[0], of.row_bytes(shape[1]))
            return f"{name.removesuffix(_WEIGHT)}{BLOCKS}", PlannedTensor(torch.uint8, blocks, partial(read, blocks))
        dtype = torch.float32 if change.less else _FLOATS.get(type_name, torch.float32)
        if type_name not in _FLOATS:
            self._check_readable(in_file, stored.tensor_type)
            self.dequantized[type_name] += 1
        return name, PlannedTensor(dtype, shape, partial(read, shape, dtype))

    def _place_of(self, name: str) -> tuple[str, int | None]:
        """The tensor of the file, and which half of its rows a tensor is; None: it is the whole."""
        layer, _, kind = name.rpartition(".")
        for ending, other in _ENDINGS.items():
            if name.endswith(ending):
                number = name.removesuffix(ending).rpartition(".")[2]
                return f"blk.{number}{other}", None
        fused = self._names.get_name(_GATE_OR_UP.sub(".experts.gate_up_proj", layer))
        if (half := _GATE_OR_UP.search(layer)) is not None and f"{fused}.{kind}" in self._stored:
            return f"{fused}.{kind}", ("gate", "up").index(half[1])
        return f"{self._names.get_name(layer)}.{kind}", None

    def _change(self, in_file: str) -> _Change:
        if self._architecture.startswith("gemma") and self._architecture != "gemma4":
            return _Change(less=1.0 if in_file.endswith("norm.weight") else 0.0)
        if self._architecture == "llama":
            heads = {".attn_q.": self._config.num_attention_heads, ".attn_k.": self._config.num_key_value_heads}
            return _Change(next((count for part, count in heads.items() if part in in_file), None))
        return _Change()

    @staticmethod
    def _check_readable(in_file: str, kind: GGMLQuantizationType) -> None:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise PreparationFailed(
                f"the tensor {in_file} of the GGUF file is stored as {kind.name}, which is not read; a file with the "
                f"types {', '.join((*_FLOATS, *BLOCK_TYPES))} is"
            ) from None


def _read(
    stored: Any,
    expert: int | None,
    rows: slice,
    change: Callable[[NDArray[Any]], NDArray[Any]],
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of the file, or some rows of it: its blocks, or with a dtype its numbers."""
    data = (stored.data if expert is None else stored.data[expert])[rows]
    if dtype is torch.bfloat16:
        return torch.from_numpy(np.array(change(data.view(np.int16)))).view(torch.bfloat16).view(shape)
    if dtype is not None and stored.tensor_type.name not in ("F32", "F16"):
        data = dequantize(data, stored.tensor_type)
    return torch.from_numpy(np.array(change(data))).to(dtype or torch.uint8).view(shape)
