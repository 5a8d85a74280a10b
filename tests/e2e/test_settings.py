"""Settings of a model and a policy, passed to a deployment as by `make run`, and as flags of `quire serve`."""

import json
import os
from pathlib import Path

import pytest
from transformers import LlamaConfig

from deployment import deployment
from llama_models import SIZES, generate, save_model
from quire_client import AsyncClient, QuireError
from tiny_model import make_model_directory, tiny_tokenizer

POLICY = """
from pathlib import Path
from scheduler_svc.core.policy import FcfsPolicy

class Marking(FcfsPolicy):
    def __init__(self, settings):
        super().__init__(settings)
        Path({mark!r}).touch()
"""


def _install_policy(root: Path, mark: Path) -> None:
    info = root / "marking-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: marking\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.policies]\nmarking = marking_policy:Marking\n")
    (root / "marking_policy.py").write_text(POLICY.format(mark=str(mark)))


async def test_a_deployment_serves_as_flags_and_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = tiny_tokenizer().get_vocab_size()
    directory = tmp_path / "model"
    directory.mkdir()
    save_model(directory, LlamaConfig(**SIZES | {"vocab_size": vocab_size}))
    (directory / "tokenizer.json").unlink()
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 2, "max_new_tokens": 5}))
    tokenizer = make_model_directory(tmp_path / "tokenizer")
    _install_policy(tmp_path / "packages", tmp_path / "mark")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    flags = [str(directory), "--tokenizer", str(tokenizer), "--chat-template", "{{ messages[0].content }}!"]
    flags += ["--override-generation-config", '{"temperature": 0}', "--max-model-len", "48", "--dtype=float"]
    flags += ["--num-gpu-blocks-override", "50", "--enable-chunked-prefill"]
    with deployment(flags, generation_config="model", policy="marking", num_threads=1) as running:
        assert (tmp_path / "mark").exists()
        async with AsyncClient(running.grpc) as client:
            (model,) = await client.models()
            assert (model.context_length, model.vocab_size) == (48, vocab_size)

            prompt = tiny_tokenizer().encode("hello world!").ids
            (expected,) = generate(directory, [prompt], 5)
            answers = [await client.chat([{"role": "user", "content": "hello world"}]), await client.generate(prompt)]
            assert [list(answer.token_ids) for answer in answers] == [expected, expected]

            whole = await client.generate([7] * 40, max_tokens=8)
            assert len(whole.token_ids) == 8
            assert (await client.generate([7] * 40, max_tokens=9)).token_ids == whole.token_ids
            for prompt, max_tokens in (([7] * 48, None), ([7] * 40, 49)):
                with pytest.raises(QuireError) as raised:
                    await client.generate(prompt, max_tokens=max_tokens)
                assert raised.value.reason == "CONTEXT_LENGTH_EXCEEDED"
                assert "48 tokens" in str(raised.value)
