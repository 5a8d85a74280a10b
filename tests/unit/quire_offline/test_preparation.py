"""A model that is not there yet is converted or downloaded before it is loaded, as `quire serve` does."""

from pathlib import Path

import pytest

from quire_offline import LLM, LoadError, SamplingParams
from svc_common.preparation import PreparationFailed
from tiny_gguf import TinyGguf, write_tiny_gguf
from worker_svc import prepare

OPTIONS = {"dtype": "float32", "kernels": "torch", "num_blocks": 8, "num_threads": 1}


def test_a_gguf_file_is_converted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    file = write_tiny_gguf(tmp_path / "tiny.gguf", TinyGguf())
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    sampled = []
    for _ in range(2):
        with LLM(str(file), **OPTIONS) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)
            sampled.append(output.outputs[0].token_ids)
    assert len(sampled[0]) == 3
    assert sampled[0] == sampled[1]


def test_why_a_model_cannot_be_downloaded_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))

    def fail(*_: object) -> None:
        raise PreparationFailed("cannot download someone/a-model")

    monkeypatch.setattr(prepare, "prepare", fail)
    with pytest.raises(LoadError, match="cannot download someone/a-model"):
        LLM("someone/a-model", **OPTIONS)
