"""Loading takes little more memory than the model."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.loading import measure
from tiny_gguf import TinyGguf, write_tiny_gguf
from worker_svc.gguf_conversion import GgufConversion


def _of_gguf(directory: Path) -> None:
    sizes = TinyGguf(hidden=512, intermediate=1536, layers=24, stored=lambda _: "Q6_K")
    gguf = write_tiny_gguf(directory / "large.gguf", sizes)
    GgufConversion(gguf, directory, print).run(keeps_blocks=True)


def _in_float32(directory: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 24, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(directory)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process's memory")
@pytest.mark.parametrize(
    ("write", "name"),
    [(_of_gguf, "gguf"), (_in_float32, "bfloat16"), (_in_float32, "w4a16")],
)
def test_loading_takes_little_more_than_the_model(write: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    """Of a model of over 40 MB: with the pages of the file, the peak would be at 2 to 7 times that."""
    write(tmp_path)
    figures = measure(tmp_path, name)
    assert figures["loaded"] > 40e6
    assert figures["most"] < 1.35 * figures["loaded"]
