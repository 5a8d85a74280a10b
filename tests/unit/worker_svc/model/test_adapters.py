"""An adapter beside a model's weights is rejected, whatever its config holds."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_models import VARIANTS
from transformers_models import VARIANTS as OTHERS
from worker_svc.attention import AttentionKind
from worker_svc.errors import UnsupportedModel
from worker_svc.model.adapters import refuse_adapters
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.loading import load

Save = Callable[..., Path]

_CATASTROPHIC = {"peft_type": "LORA", "target_modules": "(.*.*)*" * 9 + "x"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"peft_type": "LORA", "base_model_name_or_path": "owner/base"}', "an adapter (lora) of owner/base"),
        (b'{"base_model_name_or_path": "owner/base"}', "an adapter of owner/base"),
        (b'{"peft_type": 7, "target_modules": 7}', "an adapter"),
        (b'{"peft_type": "IA3", "target_modules": "("}', "an adapter (ia3)"),
        (json.dumps(_CATASTROPHIC).encode(), "an adapter (lora)"),
        (b'["LORA"]', "an adapter"),
        (b"{", "an adapter"),
        (b"", "an adapter"),
        (b"\xff\xfe\xff", "an adapter"),
        (b"[" * 100_000, "an adapter"),
    ],
    ids=["whole", "base", "numbers", "pattern", "catastrophic", "list", "cut", "empty", "bytes", "deep"],
)
def test_an_adapter_is_refused_by_its_file(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_bytes(content)
    message = f"{path} is the config of {named}, and adapters are not served"
    with pytest.raises(UnsupportedModel, match=f"^{re.escape(message)}$"):
        refuse_adapters(tmp_path)


@pytest.mark.parametrize("config", [VARIANTS["llama"], OTHERS["phi"]], ids=["native", "transformers"])
def test_a_model_with_an_adapter_is_not_loaded(config: Callable[[], object], save_model: Save) -> None:
    directory = save_model(config())
    (directory / "adapter_config.json").write_text(json.dumps(_CATASTROPHIC))
    with pytest.raises(UnsupportedModel, match=r"adapter_config\.json is the config of an adapter \(lora\)"):
        load(directory, describe(read_config(directory)), torch.float32, torch.device("cpu"), AttentionKind.TORCH)


def test_a_model_without_an_adapter_is_not_refused(tiny_llama: Path) -> None:
    refuse_adapters(tiny_llama)
