"""Writes the model of a GGUF file into a directory, with its blocks of codes as they are, or dequantized."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from svc_common.preparation import PreparationFailed, Report
from worker_svc.gguf.architecture import GgufArchitecture, find_architecture
from worker_svc.gguf.encoders import write_modules
from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.gguf.parts import parts_of
from worker_svc.gguf.plan import TensorPlan
from worker_svc.gguf.tokenizer import write_tokenizer
from worker_svc.gguf.transformers_reader import convert_by_transformers
from worker_svc.model.architecture import describe_any
from worker_svc.model.formats._gguf_blocks import BLOCK_TYPES
from worker_svc.model.formats.gguf import METHOD
from worker_svc.progress import progress
from worker_svc.tensor_writer import write_tensors


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
        architecture = find_architecture(metadata.architecture)
        config: Any
        if architecture is None:
            config = convert_by_transformers(metadata, self.directory)
            types: Mapping[str, str] = {}
        else:
            config = architecture.read_config(metadata)
            metadata.check_fields_read()
            for line in architecture.notes(metadata):
                self.report(line)
            config.architectures = config.architectures or [_class_of(config)]
            config.dtype = None if keeps_blocks else "float32"
            types = self._write_tensors(reader, metadata, architecture, config, keeps_blocks=keeps_blocks)
        _write_config(config, self.directory, types)
        if architecture is not None and architecture.is_embedding:
            write_modules(metadata, self.directory)
        else:
            _write_generation_config(config, metadata, self.directory)
        write_tokenizer(
            metadata,
            self.directory,
            self.report,
            needs_config=architecture is None,
            frames_pairs=architecture is not None and architecture.frames_pairs,
        )

    def _write_tensors(
        self,
        reader: GGUFReader,
        metadata: GgufMetadata,
        architecture: GgufArchitecture,
        config: Any,
        *,
        keeps_blocks: bool,
    ) -> Mapping[str, str]:
        """Returns the types of layers in blocks."""
        description = describe_any(config)
        if description is None:
            raise metadata.refusal(f"its {config.model_type} model is none of those that are computed natively")
        plan = TensorPlan(reader, metadata, architecture, parts_of(description), keeps_blocks=keeps_blocks)
        tensors = dict(plan.tensors())
        metadata.check_tensors_read(plan.read)
        if keeps_blocks and plan.dequantized.total():
            names = ", ".join(f"{count} of {name}" for name, count in sorted((+plan.dequantized).items()))
            self.report(f"tensors that are dequantized: {names}; {', '.join(BLOCK_TYPES)} stay as they are")
        write_tensors(self.directory / "model.safetensors", tensors)
        return plan.types


def _open(gguf: Path) -> GGUFReader:
    try:
        return GGUFReader(gguf)
    except Exception as error:  # it has no error type of its own, and reads beyond the end of a file
        raise PreparationFailed(f"{gguf} is damaged or not complete: {error}") from error


def _class_of(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    return name


def _write_config(config: Any, directory: Path, types: Mapping[str, str]) -> None:
    config.save_pretrained(directory)
    path = directory / "config.json"
    written = json.loads(path.read_text())
    written.pop("quantization_config", None)
    if types:
        written["quantization_config"] = {"quant_method": METHOD, "types": dict(types)}
    path.write_text(json.dumps(written, indent=2) + "\n")


def _write_generation_config(config: Any, metadata: GgufMetadata, directory: Path) -> None:
    from transformers import GenerationConfig

    generation = GenerationConfig.from_model_config(config)
    ends = metadata.end_tokens()
    if len(ends) > 1:
        generation.eos_token_id = ends
    elif ends:
        generation.eos_token_id = ends[0]
    generation.save_pretrained(directory)
