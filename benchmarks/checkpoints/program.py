"""Writes a quantized checkpoint with a tool, and measures its perplexity with that tool. For the Python that has it.

    python benchmarks/checkpoints/program.py --tool auto-round --scheme JSON --model DIRECTORY --calibration FILE \\
        --windows FILE --folder FOLDER --output FILE

The checkpoint is read back from its files in bfloat16 on the CPU. Those of GPTQ and AWQ are computed by gptqmodel's
kernels in torch, which unpack the weights; those of bitsandbytes and compressed-tensors by transformers with these
packages. Where the scheme of the last rounds activations too, they are measured without that and with it.
"""

import argparse
import importlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

_GROUP_SIZE = 64
_CALIBRATION_TEXTS = 8
_CALIBRATION_CHARACTERS = 4_000
Scheme = Mapping[str, Any]


def write_with_auto_round(model: Path, folder: Path, scheme: Scheme, calibration: Path) -> None:
    """Rounds to the nearest code, and writes the format that the scheme names."""
    options = {key: value for key, value in scheme.items() if key != "format"}
    weights, tokenizer = _load(model)
    quantizer: Any = importlib.import_module("auto_round").AutoRound(
        weights, tokenizer, group_size=_GROUP_SIZE, iters=0, disable_opt_rtn=True, device_map="cpu", **options
    )
    quantizer.quantize_and_save(str(folder), format=scheme["format"])


def write_with_gptqmodel(model: Path, folder: Path, scheme: Scheme, calibration: Path) -> None:
    """Runs GPTQ on a few texts."""
    gptqmodel: Any = importlib.import_module("gptqmodel")
    text, size = calibration.read_text(), _CALIBRATION_CHARACTERS
    texts = [text[start : start + size] for start in range(0, _CALIBRATION_TEXTS * size, size)]
    config = gptqmodel.QuantizeConfig(group_size=_GROUP_SIZE, act_group_aware=False, **scheme)
    quantized = gptqmodel.GPTQModel.load(str(model), config, device="cpu")
    quantized.quantize(texts, batch_size=1)
    quantized.save(str(folder))


def write_with_llmcompressor(model: Path, folder: Path, scheme: Scheme, calibration: Path) -> None:
    """Rounds to the nearest code; the head stays dense."""
    weights, tokenizer = _load(model)
    modifiers: Any = importlib.import_module("llmcompressor.modifiers.quantization")
    recipe = modifiers.QuantizationModifier(ignore=["lm_head"], **scheme)
    importlib.import_module("llmcompressor").oneshot(model=weights, recipe=recipe)
    weights.save_pretrained(str(folder), save_compressed=True)
    tokenizer.save_pretrained(str(folder))


def write_with_bitsandbytes(model: Path, folder: Path, scheme: Scheme, calibration: Path) -> None:
    """Rounds to the nearest code; the head stays dense."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.BitsAndBytesConfig(**scheme, bnb_4bit_compute_dtype=torch.bfloat16)
    weights = transformers.AutoModelForCausalLM.from_pretrained(
        str(model), dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )
    weights.save_pretrained(str(folder))
    transformers.AutoTokenizer.from_pretrained(str(model)).save_pretrained(str(folder))


def _load(model: Path) -> tuple[Any, Any]:
    transformers: Any = importlib.import_module("transformers")
    weights = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.bfloat16)
    return weights, transformers.AutoTokenizer.from_pretrained(str(model))


WRITERS: Mapping[str, Callable[[Path, Path, Scheme, Path], None]] = {
    "auto-round": write_with_auto_round,
    "bitsandbytes": write_with_bitsandbytes,
    "gptqmodel": write_with_gptqmodel,
    "llmcompressor": write_with_llmcompressor,
}


def read_back(directory: Path) -> Any:
    """The model in a checkpoint, as the tool of its format computes it."""
    method = json.loads((directory / "config.json").read_bytes())["quantization_config"]["quant_method"]
    if method in ("bitsandbytes", "compressed-tensors"):
        transformers: Any = importlib.import_module("transformers")
        return transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.bfloat16).eval()
    gptqmodel: Any = importlib.import_module("gptqmodel")
    backend = gptqmodel.BACKEND.AWQ_TORCH if method == "awq" else gptqmodel.BACKEND.GPTQ_TORCH
    return gptqmodel.GPTQModel.load(str(directory), device="cpu", dtype=torch.bfloat16, backend=backend)


def rounds_activations(model: Any) -> bool:
    """Whether a layer's scheme, of compressed-tensors, has activations in fewer bits."""
    schemes = (getattr(module, "quantization_scheme", None) for module in model.modules())
    return any(scheme is not None and scheme.input_activations is not None for scheme in schemes)


@torch.inference_mode()
def perplexity(model: Any, windows: list[tuple[list[int], int]]) -> float:
    """Of the tokens of each window from its number of given ones on."""
    total, count = 0.0, 0
    for tokens, num_given in windows:
        ids = torch.tensor([tokens])
        logprobs = model(input_ids=ids).logits[0, num_given - 1 : -1].float().log_softmax(-1)
        total += float(logprobs.gather(1, ids[0, num_given:, None]).double().sum())
        count += len(tokens) - num_given
    return math.exp(-total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=list(WRITERS), required=True)
    parser.add_argument("--scheme", type=json.loads, required=True, help="the tool's own options, as JSON")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--calibration", type=Path, required=True, help="file with text")
    parser.add_argument("--windows", type=Path, required=True, help="file with tokens, and how many of them are given")
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint, or for a folder that has it")
    parser.add_argument("--output", type=Path, required=True, help="file for the result")
    options = parser.parse_args()
    WRITERS[options.tool](options.model, options.folder, options.scheme, options.calibration)
    (config,) = options.folder.rglob("config.json")
    windows = json.loads(options.windows.read_bytes())
    model = read_back(config.parent)
    result: dict[str, Any] = {"directory": str(config.parent)}
    if rounds_activations(model):
        result["activations_too"] = perplexity(model, windows)
        model.apply(importlib.import_module("compressed_tensors.quantization").disable_quantization)
    result["perplexity"] = perplexity(model, windows)
    options.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
