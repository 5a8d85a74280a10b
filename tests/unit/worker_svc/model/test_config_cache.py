"""A native model's config is the same the second time, and read anew where anything changed that it comes of."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_models import VARIANTS
from transformers_models import VARIANTS as OTHERS
from worker_svc.model import config_cache
from worker_svc.model.config import native_config, read_config
from worker_svc.model.config_cache import load_native_config

Save = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_kept_is_what_was_read(variant: str, save_model: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(VARIANTS[variant]())
    read = load_native_config(directory)
    assert read == native_config(read_config(directory))
    monkeypatch.setattr(config_cache, "read_config", None)
    assert load_native_config(directory) == read


def test_another_config_is_read(save_model: Save) -> None:
    directory = save_model(VARIANTS["llama"]())
    first = load_native_config(directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 77}))
    second = load_native_config(directory)
    assert first is not None
    assert second is not None
    assert (first.context_length != 77, second.context_length) == (True, 77)


def test_other_architectures_are_left_to_transformers(save_model: Save, cache: Path) -> None:
    assert load_native_config(save_model(next(iter(OTHERS.values()))())) is None
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_does_no_harm(save_model: Save, cache: Path) -> None:
    cache.write_text("a file where the directory would be")
    assert load_native_config(save_model(VARIANTS["llama"]())) is not None
