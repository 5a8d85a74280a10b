"""What a model's weights take, seen before they are loaded."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from math import prod
from operator import add
from pathlib import Path
from typing import Protocol

import torch

from quire_kernels.cpu.grouped_bytes import BYTE_GROUP_SIZES
from quire_kernels.cpu.nibbles import DEFAULT_GROUP
from worker_svc.kernel_choice import MATRIX_FORMATS
from worker_svc.model.architecture import AnyDescription
from worker_svc.model.block_weights import joined_form
from worker_svc.model.building import drops_head
from worker_svc.model.compiled_builder import IN_NIBBLES, can_bound_head
from worker_svc.model.description import ExpertsSpec, LinearLayer, LinearRole, ModelDescription, StoredLinear
from worker_svc.model.device_formats import Quantization
from worker_svc.model.stored_linear import StoredCodes, layer_format
from worker_svc.model.weight_format import BlockForm, CodeForm, WeightFormat, block_form, format_of
from worker_svc.model.weights import Checkpoint, open_weights, weight_files

_PER_NUMBER = {"int8": 1.0, "w8a8": 1.0, "w4a16": 0.625, "w4a8": 0.625, "fp8": 1.0}
"""Bytes of a weight, by QUIRE_QUANTIZATION: a group of 32 numbers in 4 bits has 4 bytes more."""
_IN_4_BITS = ("w4a16", "w4a8")
_BLOCK_BITS = 1024  # of the words of a block: see quire_kernels/weight_only_matrix.py
_PLAIN = {"F64", "F32", "F16", "BF16"}  # stored numbers that are converted to the dtype of the computation
_STORED = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # bytes; all others have one


def bytes_per_weight(quantization: str, dtype: torch.dtype) -> float:
    """What a number of a matrix takes, with a value of QUIRE_QUANTIZATION."""
    return _PER_NUMBER.get(quantization, float(dtype.itemsize))


class WeightSizes(Protocol):
    """The sizes of a model's weights."""

    @property
    def num_weights(self) -> int:
        """How many numbers they are."""

    def num_bytes(self, dtype: torch.dtype, quantization: str, kernels: str) -> int:
        """What they take with a value of QUIRE_QUANTIZATION, where kernels of a `kernel_name` compute them."""


@dataclass(frozen=True, slots=True)
class HeaderSizes:
    """The sizes of the weights of an encoder, or of a model that transformers' own modules compute: from the headers of
    its files.
    """

    matrices: int = 0
    """Numbers of matrices that are quantized."""
    others: int = 0
    packed_bytes: int = 0
    """Bytes of what is stored in another form than plain numbers: it is quantized already."""

    def __add__(self, other: "HeaderSizes") -> "HeaderSizes":
        return HeaderSizes(*map(add, astuple(self), astuple(other)))

    @property
    def num_weights(self) -> int:
        return self.matrices + self.others

    def num_bytes(self, dtype: torch.dtype, quantization: str, kernels: str) -> int:
        of_matrices = int(self.matrices * bytes_per_weight(quantization, dtype))
        return of_matrices + self.others * dtype.itemsize + self.packed_bytes


def read_header_sizes(directory: Path) -> HeaderSizes:
    """Raises UnsupportedModel if a file is missing or damaged."""
    sizes = HeaderSizes()
    for path in weight_files(directory):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                sizes += _sizes_of(name, tensor.get_shape(), tensor.get_dtype())
    return sizes


def _sizes_of(name: str, shape: Sequence[int], stored: str) -> HeaderSizes:
    """The sizes of one tensor."""
    count = prod(shape)
    if stored not in _PLAIN:
        return HeaderSizes(packed_bytes=count * _STORED.get(stored, 1))
    if len(shape) > 1 and "embed" not in name:
        return HeaderSizes(matrices=count)
    return HeaderSizes(others=count)


@dataclass(frozen=True)
class DecoderSizes:
    """Of the weights of a decoder that Quire's kernels compute, with the codes that they keep of a checkpoint.

    All groups of 4 bits that are rounded are taken to have 32 inputs, and all stored groups to be such that a product
    can have them.
    """

    description: ModelDescription
    weight_format: WeightFormat
    names: Collection[str]
    """Of the checkpoint's tensors, as the description has them; a head among them takes memory."""
    has_head: bool = True
    """False: only hidden states are computed."""

    @property
    def num_weights(self) -> int:
        linear_layers = self._laid_out("torch")
        numbers = sum(linear.inputs * sum(linear.outputs) for linear in linear_layers)
        return numbers + sum(map(prod, self.description.shapes.values()))

    def num_bytes(self, dtype: torch.dtype, quantization: str, kernels: str) -> int:
        of_tables = sum(map(prod, self.description.shapes.values())) * dtype.itemsize
        of_layers = (
            self._bytes_of_number(linear, dtype, quantization, kernels) * linear.inputs * sum(linear.outputs)
            for linear in self._laid_out(kernels)
        )
        return of_tables + int(sum(of_layers)) + self._bytes_of_bounds(quantization, kernels)

    def _bytes_of_bounds(self, quantization: str, kernels: str) -> int:
        """Those of the head in 8 bits that bounds its logits; products by AMX do without, so this is the most."""
        head = self.description.head
        in_model_dtype = self.has_head and _asked_of(head, quantization) not in _PER_NUMBER
        is_bounded = kernels == "compiled" and in_model_dtype and can_bound_head(self.description)
        return head.inputs * sum(head.outputs) if is_bounded else 0

    def _bytes_of_number(self, linear: LinearLayer, dtype: torch.dtype, quantization: str, kernels: str) -> float:
        asked = _asked_of(linear, quantization)
        is_head = linear.role is LinearRole.HEAD
        if asked not in _PER_NUMBER or linear in self._in_model_dtype or (is_head and kernels == "triton"):
            return dtype.itemsize
        codes = StoredCodes.of(linear, self.weight_format, self.names)
        of_expert = linear in self._experts(kernels)
        if codes.has_blocks if is_head else codes.keeps_blocks(of_expert=of_expert):
            return _held(self._form_of_blocks(linear, takes_e2m1=_takes_e2m1(asked, kernels)), linear.inputs, kernels)
        if is_head:
            return 1.0
        keeps_nibbles = codes.keeps_nibbles(of_expert=of_expert) and _keeps_nibbles(asked, kernels)
        if keeps_nibbles or asked in _IN_4_BITS:
            return _held(CodeForm(4, DEFAULT_GROUP), linear.inputs, kernels)
        if asked == "int8" and kernels == "triton":
            return _in_words(8, linear.inputs) / linear.inputs
        return _PER_NUMBER[asked]

    @cached_property
    def _in_model_dtype(self) -> set[LinearLayer]:
        latents = (layer.attention.latent for layer in self.description.layers)
        return {latent.kv_up for latent in latents if latent is not None}

    def _experts(self, kernels: str) -> set[LinearLayer]:
        """A shared MLP is one more expert on a processor, and a layer as all others on a GPU."""
        mixtures = [layer.mlp for layer in self.description.layers if isinstance(layer.mlp, ExpertsSpec)]
        mlps = [mlp for mixture in mixtures for mlp in (mixture.mlps if kernels == "compiled" else mixture.experts)]
        return {linear for mlp in mlps for linear in (mlp.gate_up, mlp.down)}

    def _laid_out(self, kernels: str) -> Iterator[LinearLayer]:
        """The layers that take memory beside the embedding. Only the compiled kernels have another copy of it as a
        head.
        """
        *layers, head = self.description.linear_layers
        yield from layers
        if not self.has_head:
            return
        if not self.description.tied_embeddings or f"{head.stored[0].name}.weight" in self.names:
            yield head
        elif kernels == "compiled":
            embedding = self.description.embedding.removesuffix(".weight")
            yield replace(head, stored=(StoredLinear(embedding, head.outputs),))

    def _form_of_blocks(self, layer: LinearLayer, *, takes_e2m1: bool) -> CodeForm:
        """The form of a layer that `read_blocks` reads."""
        forms = [
            block_form(layer_format(stored, layer.inputs, self.weight_format, self.names), stored.name)
            for stored in layer.stored
        ]
        if not any(forms):  # codes in 8 bits of a `GroupFormat`
            return CodeForm(8, BYTE_GROUP_SIZES[-1])
        if not (takes_e2m1 and all(form is not None and form.is_e2m1 for form in forms)):
            forms = [_whole(form) for form in forms]
        return joined_form(forms)


def _asked_of(linear: LinearLayer, quantization: str) -> str:
    """The format that a layer is to be computed in."""
    return quantization if linear.computed is None else linear.computed.value


def _held(form: CodeForm, inputs: int, kernels: str) -> float:
    """What a number takes in codes. On a GPU these fill whole blocks of words, and a group has four bytes more."""
    if kernels != "triton":
        return form.bytes_held
    return (_in_words(form.bits, inputs) + 4 * -(-inputs // form.group)) / inputs


def _in_words(bits: int, inputs: int) -> int:
    """What the words of an output take."""
    return -(-inputs * bits // _BLOCK_BITS) * _BLOCK_BITS // 8


def _whole(form: BlockForm | None) -> BlockForm | None:
    """The form of a layer whose codes of e2m1, if it has some, become whole numbers, which have 5 bits."""
    return form if form is None or not form.is_e2m1 else BlockForm(5, form.group)


def _takes_e2m1(quantization: str, kernels: str) -> bool:
    """Whether products keep codes of e2m1 in 4 bits."""
    return kernels == "triton" or (kernels == "compiled" and not MATRIX_FORMATS[quantization].takes_codes)


def _keeps_nibbles(quantization: str, kernels: str) -> bool:
    if kernels == "triton":
        return Quantization(quantization).keeps_nibbles
    return MATRIX_FORMATS[quantization] in IN_NIBBLES


def read_decoder_sizes(
    directory: Path, description: ModelDescription, dtype: torch.dtype, *, has_head: bool = True
) -> DecoderSizes:
    """Of a model that Quire's kernels compute in a dtype. Raises UnsupportedModel if a file is missing or damaged.

    A head in whose place the embedding is used does not count; where both are stored, they are compared.
    """
    checkpoint = Checkpoint(directory, format_of(directory), dtype, torch.device("cpu"))
    has_copy = drops_head(description, checkpoint)
    head = {f"{stored.name}.weight" for stored in description.head.stored} if has_copy else set()
    return DecoderSizes(description, checkpoint.weight_format, set(checkpoint.names) - head, has_head)


def read_value_sizes(directory: Path, description: AnyDescription, dtype: torch.dtype) -> WeightSizes:
    """Those of a model that computes values of prompts. Raises as `read_header_sizes`."""
    if isinstance(description, ModelDescription):
        return read_decoder_sizes(directory, description, dtype, has_head=False)
    return read_header_sizes(directory)
