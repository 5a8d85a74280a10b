"""A cached description equals the first one, and is made again when anything that it depends on changes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

import image_models
import llama_models
from bert_models import save_classifier
from llama_models import VARIANTS
from transformers_models import VARIANTS as OTHERS
from worker_svc.model import architecture, description_cache
from worker_svc.model.architecture import Architecture, describe, describe_any
from worker_svc.model.config import read_config
from worker_svc.model.description_cache import any_description_of, description_of

Save = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_kept_is_what_was_described(variant: str, save_model: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(VARIANTS[variant]())
    described = description_of(directory)
    assert described == describe(read_config(directory))
    monkeypatch.setattr(description_cache, "read_config", None)
    assert description_of(directory) == described


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "gte", "mpnet", "modernbert"])
def test_what_is_kept_of_an_encoder(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_classifier(tmp_path, architecture)
    described = any_description_of(tmp_path)
    assert described == describe_any(read_config(tmp_path))
    monkeypatch.setattr(description_cache, "read_config", None)
    assert any_description_of(tmp_path) == described


def test_what_is_kept_of_a_model_that_also_takes_images(
    save_model: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_model(image_models.VARIANTS["qwen3-vl-moe"](), kind=AutoModelForImageTextToText)
    described = description_of(directory)
    assert described == describe(read_config(directory))
    monkeypatch.setattr(description_cache, "read_config", None)
    assert description_of(directory) == described


def test_a_changed_architecture_of_a_text_model_invalidates_the_cache(
    save_model: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_model(image_models.VARIANTS["llava"](), kind=AutoModelForImageTextToText)
    find, described = architecture._registry.find, describe(llama_models.VARIANTS["llama"]())
    assert described is not None
    source = tmp_path / "theirs.py"
    for length in (77, 78):
        source.write_text(str(length))
        theirs = Architecture(str(source), "LlamaForCausalLM", lambda config: replace(described, context_length=length))  # noqa: B023
        monkeypatch.setattr(
            architecture._registry,
            "find",
            lambda name, theirs=theirs: theirs if name == "llama" else find(name),
        )
        made = description_of(directory)
        assert made is not None
        assert made.context_length == length


def test_another_config_is_described(save_model: Save) -> None:
    directory = save_model(VARIANTS["llama"]())
    first = description_of(directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 77}))
    second = description_of(directory)
    assert first is not None
    assert second is not None
    assert (first.context_length != 77, second.context_length) == (True, 77)


def test_a_changed_source_of_an_architecture_invalidates_the_cache(
    save_model: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_model(VARIANTS["llama"]())
    described = describe(read_config(directory))
    assert described is not None
    source = tmp_path / "theirs.py"
    for length in (77, 78):
        source.write_text(str(length))
        theirs = Architecture(str(source), "LlamaForCausalLM", lambda config: replace(described, context_length=length))  # noqa: B023
        monkeypatch.setattr(architecture._registry, "find", {"llama": theirs}.get)
        made = description_of(directory)
        assert made is not None
        assert made.context_length == length


def test_another_version_of_a_package_invalidates_the_cache(save_model: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(VARIANTS["llama"]())
    described = describe(read_config(directory))
    assert described is not None
    for length, version in enumerate(("1.0", "1.1"), start=77):
        theirs = Architecture(
            __file__,
            "LlamaForCausalLM",
            lambda config: replace(described, context_length=length),  # noqa: B023
        )
        monkeypatch.setattr(architecture._registry, "find", {"llama": theirs}.get)
        monkeypatch.setattr(architecture._registry, "origin", {"llama": f"theirs {version}"}.get)
        made = description_of(directory)
        assert made is not None
        assert made.context_length == length


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff", b"[1]"], ids=str)
def test_a_damaged_cache_is_written_again(content: bytes, save_model: Save, cache: Path) -> None:
    directory = save_model(VARIANTS["llama"]())
    described = description_of(directory)
    (kept,) = cache.glob("descriptions/*.json")
    whole = kept.read_bytes()
    for damaged in (content, whole.replace(b'"num_heads":', b'"num_heads":1')):
        kept.write_bytes(damaged)
        assert description_of(directory) == described
        assert kept.read_bytes() == whole


def test_other_architectures_are_left_to_transformers(save_model: Save, cache: Path) -> None:
    assert description_of(save_model(OTHERS["phi"]())) is None
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_does_no_harm(save_model: Save, cache: Path) -> None:
    cache.write_text("a file where the directory would be")
    assert description_of(save_model(VARIANTS["llama"]())) is not None
