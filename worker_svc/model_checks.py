"""The checks of `quire doctor` for a worker's model: files and architecture. No weights are loaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from quire_kernels.cpu.attention import check_compiled_support
from svc_common.doctor.findings import CheckContext, Finding, ok, skipped, warning, wrong
from svc_common.doctor.prepared import is_prepared, next_step_for
from svc_common.models import ModelNotFound, ServedModel, find_source, find_tokenizer
from worker_svc.description import context_length_of
from worker_svc.encoder.backend import (
    EncoderKernels,
    check_quantized,
    choose_kernels,
    own_kernels,
    quantization_of_values,
)
from worker_svc.errors import StartupFailed, UnsupportedModel
from worker_svc.kernel_choice import (
    DeviceNotFound,
    choose_decoder_dtype,
    choose_device,
    choose_dtype,
)
from worker_svc.model import compiled_body, decoder_states, torch_model
from worker_svc.model.adapters import refuse_adapters
from worker_svc.model.architecture import AnyDescription, describe_any
from worker_svc.model.config import raw_config, read_config
from worker_svc.model.description import ModelDescription
from worker_svc.model.device_formats import COMPUTED as COMPUTED_ON_DEVICE
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.stored_linear import layer_format, shapes_of
from worker_svc.model.support import is_native_alone, unsupported_reason
from worker_svc.model.tensor_names import described_names, renamed_format
from worker_svc.model.value_models import for_task
from worker_svc.model.weight_format import WeightFormat, format_of, names_read
from worker_svc.model.weights import open_weights, weight_files
from worker_svc.settings import WorkerSettings
from worker_svc.weight_sizes import DecoderSizes, WeightSizes, read_decoder_sizes, read_header_sizes, read_value_sizes

_COPY_AGAIN = "copy or download the model's files again, all of them, or set QUIRE_MODEL to another model"
_OTHER_MODEL = "set QUIRE_MODEL to a model of a supported architecture; docs/design/models.md lists them"


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model whose files are complete, as far as this can be seen without loading it."""

    served: ServedModel
    config: Any
    """As transformers completes it."""
    description: ModelDescription | None
    """Of a decoder; None: an encoder, or transformers' own modules compute it."""
    computed_by: str
    num_parameters: int
    sizes: WeightSizes
    has_kv: bool = True
    """False: an encoder, which keeps no keys and values."""
    quantization: str = "none"
    """The QUIRE_QUANTIZATION that has an effect on a model without keys and values."""
    kernels: str = ""
    """What computes a model without keys and values."""

    @property
    def is_native(self) -> bool:
        """Whether Quire's kernels compute it, as a decoder."""
        return isinstance(self.sizes, DecoderSizes)

    def dtype(self, settings: WorkerSettings, device: torch.device) -> torch.dtype:
        """In which a worker would compute it."""
        if not self.has_kv:
            return choose_dtype(settings.dtype, device)
        return choose_decoder_dtype(settings, self.description, device)


class IncompleteModel(Exception):  # noqa: N818
    """A model with missing, damaged or unsupported files."""

    def __init__(self, problem: str, next_step: str) -> None:
        super().__init__(problem)
        self.problem, self.next_step = problem, next_step


def find_model_problems(context: CheckContext) -> Iterator[Finding]:
    settings: WorkerSettings = context.settings
    found = settings.model or "the default model"
    try:
        yield from _not_pinned(settings)
        if (finding := unprepared(context)) is not None:
            yield finding
            return
        model = read_model(settings)
    except ModelNotFound as error:
        yield wrong(found, str(error), next_step_for(error))
    except IncompleteModel as error:
        yield wrong(found, error.problem, error.next_step)
    except DeviceNotFound as error:
        yield skipped(str(error))
    else:
        size = f"{model.num_parameters / 1e6:,.0f} million parameters"
        dtype = str(model.dtype(settings, choose_device(settings.device))).removeprefix("torch.")
        yield ok(f"{model.served.name}: {model.config.model_type}, {size}, {dtype}, computed by {model.computed_by}")


def _not_pinned(settings: WorkerSettings) -> Iterator[Finding]:
    """What follows a branch of a hub. Raises ModelNotFound."""
    sources = {
        "QUIRE_REVISION": find_source(settings.model, settings.revision),
        "QUIRE_TOKENIZER_REVISION": find_tokenizer(
            settings.model, settings.revision, settings.tokenizer, settings.tokenizer_revision
        ),
    }
    for setting, source in sources.items():
        if source is not None and (why := source.why_not_pinned()):
            yield warning(str(source), why, f"set {setting} to a commit")


def unprepared(context: CheckContext) -> Finding | None:
    """Says that the model will be there only later; None: it is."""
    settings: WorkerSettings = context.settings
    sources = (settings.model, settings.revision, settings.tokenizer, settings.tokenizer_revision)
    if context.by_supervisor and not is_prepared(*sources, with_weights=True):
        return skipped(f"{settings.model or 'the default model'} is not prepared yet; `make run` does that first")
    return None


def read_model(settings: WorkerSettings) -> CheckedModel:
    """Reads the config and the headers of the weights. Raises ModelNotFound, IncompleteModel and DeviceNotFound."""
    served = settings.served_model()
    directory = served.path
    try:
        raw_config(directory)
    except UnsupportedModel as error:
        raise IncompleteModel(str(error), _COPY_AGAIN) from error
    try:
        weight_format = format_of(directory)
        refuse_adapters(directory)
        config = read_config(directory)
        description, has_values = for_task(describe_any(config), directory, settings.task)
        has_head = description is not None and description.score_head is not None
        if has_values and not has_head:
            embedding_defaults(directory)
        elif isinstance(description, ModelDescription) and not has_values:
            context_length_of(settings.max_model_len, description.context_length)
    except StartupFailed as error:
        raise IncompleteModel(str(error), _OTHER_MODEL) from error
    shapes = read_shapes(directory)
    num_parameters = sum(map(prod, shapes.values()))
    if description is not None and (has_values or isinstance(description, EncoderDescription)):
        device = choose_device(settings.device)
        name = f"{_values_computed_by(settings, description, device)}, as an encoder"
        kernels, _ = _kernels_of_values(settings, description, device)
        return CheckedModel(
            served,
            config,
            None,
            name,
            num_parameters,
            read_value_sizes(directory, description, choose_dtype(settings.dtype, device)),
            has_kv=False,
            quantization=quantization_of_values(settings, description, device),
            kernels=kernels,
        )
    computed_by, is_native = _computed_by(settings, directory, config, description)
    if description is None or not is_native:
        return CheckedModel(served, config, description, computed_by, num_parameters, read_header_sizes(directory))
    try:
        _check_tensors(directory, description, weight_format, shapes)
    except UnsupportedModel as error:
        raise IncompleteModel(str(error), _OTHER_MODEL) from error
    dtype = choose_decoder_dtype(settings, description, choose_device(settings.device))
    sizes = read_decoder_sizes(directory, description, dtype)
    return CheckedModel(served, config, description, computed_by, _num_parameters(description), sizes)


def backend_of_values(settings: WorkerSettings) -> tuple[EncoderKernels, str] | None:
    """What computes the values of prompts, and the QUIRE_QUANTIZATION that has an effect; None: the model generates, or
    its files cannot be read, which `read_model` reports. Raises DeviceNotFound.
    """
    try:
        directory = settings.served_model().path
        description, has_values = for_task(describe_any(read_config(directory)), directory, settings.task)
    except (ModelNotFound, StartupFailed, ImportError, OSError, ValueError):
        return None
    if description is None or not has_values:
        return None
    device = choose_device(settings.device)
    kernels, _ = _kernels_of_values(settings, description, device)
    return kernels, quantization_of_values(settings, description, device)


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors, from the headers of the files. Raises IncompleteModel where a file is damaged."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in weight_files(directory):
            with open_weights(path) as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except UnsupportedModel as error:
        raise IncompleteModel(str(error), _COPY_AGAIN) from error
    return shapes


def _check_tensors(
    directory: Path, model: ModelDescription, weight_format: WeightFormat, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Raises IncompleteModel if a tensor is missing or of another shape."""
    stored_names = names_read(weight_format, shapes)
    places = described_names(model, stored_names.keys())
    weight_format = renamed_format(weight_format, places)
    expected = dict(model.shapes)
    for layer in model.linear_layers:
        if layer is not model.head or not model.tied_embeddings:
            for stored in layer.stored:
                of_layer = layer_format(stored, layer.inputs, weight_format, places)
                expected |= shapes_of(stored, layer.inputs, of_layer)
    if missing := sorted(expected.keys() - places.keys()):
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise IncompleteModel(f"the model in {directory} has no tensor {missing[0]}{more}", _COPY_AGAIN)
    for name, shape in expected.items():
        place = places[name]
        stored_name = stored_names[place.name]
        if not place.is_stored_as(shapes[stored_name], shape):
            found, whole = list(shapes[stored_name]), list(place.whole(shape))
            problem = f"the tensor {stored_name} of the model in {directory} is {found}, not {whole}"
            raise IncompleteModel(problem, _COPY_AGAIN)


def _num_parameters(model: ModelDescription) -> int:
    """As they are computed: packed weights take less in files."""
    shapes = dict(model.shapes)
    for layer in model.linear_layers:
        if layer is not model.head or not model.tied_embeddings:
            for stored in layer.stored:
                shapes |= shapes_of(stored, layer.inputs, DenseFormat())
    return sum(map(prod, shapes.values()))


def _computed_by(
    settings: WorkerSettings, directory: Path, config: Any, description: ModelDescription | None
) -> tuple[str, bool]:
    """What computes the model, and whether that is Quire's own code. Raises IncompleteModel where nothing does."""
    device = choose_device(settings.device)
    if description is not None:
        if device.type == "cuda" or settings.kernels == "triton":
            computed, name = COMPUTED_ON_DEVICE, "Triton kernels"
        elif settings.kernels == "torch":
            computed, name = torch_model.COMPUTED, "torch's operators"
        else:
            dtype = choose_decoder_dtype(settings, description, device)
            refused = check_compiled_support(description.layout.head_dims, settings.block_size, dtype)
            computed, fast = compiled_body.COMPUTED, "compiled kernels"
            name = fast if refused is None else f"torch's operators, since the compiled kernels refuse it: {refused}"
        if (unsupported := unsupported_reason(description, computed)) is None:
            return name, True
        if is_native_alone(description):
            problem = f"the model in {directory} has latent attention, and no kernels compute {unsupported}"
            raise IncompleteModel(problem, _OTHER_MODEL)
        why = f", since Quire's kernels do not support {unsupported}"
    else:
        why = ", since Quire has no description of this architecture"
    _check_transformers(directory, config)
    return f"transformers' own modules, slower{why}", False


def _kernels_of_values(
    settings: WorkerSettings, description: AnyDescription, device: torch.device
) -> tuple[EncoderKernels, str | None]:
    """As `choose_kernels` says, in the dtype of the settings."""
    return choose_kernels(settings, description, choose_dtype(settings.dtype, device), device)


def _values_computed_by(settings: WorkerSettings, description: AnyDescription, device: torch.device) -> str:
    """What computes the values of prompts. Raises IncompleteModel where the settings name kernels that refuse the
    model, or a format of weights that they do not compute.
    """
    try:
        check_quantized(settings, description, choose_dtype(settings.dtype, device), device)
    except StartupFailed as error:
        raise IncompleteModel(str(error), "unset QUIRE_QUANTIZATION, or change what the problem names") from error
    kernels, refused = _kernels_of_values(settings, description, device)
    if kernels == "torch" and isinstance(description, ModelDescription):
        lacking = unsupported_reason(description, decoder_states.COMPUTED)
        if lacking is not None:
            raise IncompleteModel(f"torch's operators do not compute embeddings with {lacking}", _OTHER_MODEL)
    names = {"triton": "Triton kernels", "compiled": "compiled kernels", "torch": "torch's operators"}
    if refused is None:
        return names[kernels]
    own = own_kernels(device)
    if settings.kernels == own:
        raise IncompleteModel(f"the {own} kernels cannot be used: {refused}", f"set QUIRE_KERNELS to auto, not {own}")
    return f"{names[kernels]}, since the {names[own]} refuse it: {refused}"


def _check_transformers(directory: Path, config: Any) -> None:
    from worker_svc.model.probe import IncompatibleModel
    from worker_svc.model.transformers_model import check_class

    try:
        check_class(config)
    except IncompatibleModel as error:
        raise IncompleteModel(f"the model in {directory} {error}", _OTHER_MODEL) from error
