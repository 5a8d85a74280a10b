"""A gateway reads the same of the default model, whether its own image prepared it or a worker's."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway_svc.prepare import prepare
from svc_common.model_settings import ModelSettings


@pytest.fixture
def light(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a gateway's image prepares."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    return prepare(ModelSettings(), print).path


def test_the_shipped_tokenizer_is_that_of_the_package(model: Path, light: Path) -> None:
    # Workers and gateways work together only if the files are equal to the byte.
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (light / name).read_bytes() == (model / name).read_bytes()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert _config(light / name) == _config(model / name)


def _config(path: Path) -> dict[str, Any]:
    config = dict(json.loads(path.read_text()))
    # Nothing reads these. Earlier releases wrote the last two, and a model that one of them prepared is kept.
    for name in ("transformers_version", "_model_name_or_path", "unk_token_id"):
        config.pop(name, None)
    return config
