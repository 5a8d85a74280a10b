"""Loading takes little more memory than the model."""

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.loading import measure
from tiny_gguf import TinyGguf, write_tiny_gguf
from worker_svc.gguf.conversion import GgufConversion


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    sizes = TinyGguf(hidden=512, intermediate=1536, layers=12, stored=lambda _: "Q6_K")
    path = write_tiny_gguf(directory / "model.gguf", sizes)
    GgufConversion(path, directory, print).run(keeps_blocks=True)
    return directory


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("float32")
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 24, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process's memory")
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gguf", "gguf"),
        pytest.param("in_float32", "bfloat16", marks=pytest.mark.large),
        ("in_float32", "w4a16"),
    ],
)
def test_loading_takes_little_more_than_the_model(model: str, name: str, request: pytest.FixtureRequest) -> None:
    """With the pages of the files, the peak would be 1.7 to 7 times the model. One layer of it counts, too."""
    figures = measure(request.getfixturevalue(model), name)
    assert figures["loaded"] > 40e6
    assert figures["peak"] < 1.35 * figures["loaded"]
