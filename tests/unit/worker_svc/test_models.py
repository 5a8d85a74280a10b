"""A model is found by what names it, and what is missing is said with what to do about it."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from svc_common.models import DEFAULT_MODEL, ModelNotFound, find_source, resolve_model, tokenizer_fingerprint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache" / "models"


def _write_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


@pytest.mark.parametrize("model", [None, "", DEFAULT_MODEL])
def test_the_default_model_is_served_once_it_is_prepared(model: str | None, cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"python -m worker_svc\.prepare"):
        resolve_model(model)
    _write_model(cache / DEFAULT_MODEL)
    served = resolve_model(model)
    assert (served.name, served.path) == (DEFAULT_MODEL, cache / DEFAULT_MODEL)


def test_a_directory_is_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = _write_model(tmp_path / "models" / "mine")
    assert resolve_model(str(directory)).name == "mine"
    monkeypatch.chdir(directory)
    served = resolve_model(".")
    assert (served.name, served.path) == ("mine", directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_without_a_file_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    directory = _write_model(tmp_path / "mine")
    (directory / name).unlink()
    with pytest.raises(ModelNotFound, match=name):
        resolve_model(str(directory))


def test_a_gguf_file_is_served_under_its_stem_from_the_cache(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "tiny.Q4.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=rf"prepare {gguf}"):
        resolve_model(str(gguf))
    directory = find_source(str(gguf)).directory()
    assert directory is not None
    assert directory.parent == cache
    _write_model(directory)
    assert resolve_model(str(gguf)).name == "tiny.Q4"


def test_gguf_files_of_one_name_are_different_models(tmp_path: Path) -> None:
    directories = set()
    for place, content in (("a", b"GGUF"), ("b", b"GGUF"), ("b", b"GGUF2")):
        (tmp_path / place).mkdir(exist_ok=True)
        path = tmp_path / place / "tiny.gguf"
        path.write_bytes(content)
        directories.add(find_source(str(path)).directory())
    assert len(directories) == 3


def test_a_hub_id_is_served_under_itself_from_the_local_cache(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="prepare owner/name"):
        resolve_model("owner/name")
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = _write_model(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    served = resolve_model("owner/name")
    assert (served.name, served.path) == ("owner/name", snapshot)


@pytest.mark.parametrize("model", ["./nowhere", "/no/where", "no/such/model", "gone.gguf", "owner/../name", "-x"])
def test_what_can_be_no_model_is_refused(model: str) -> None:
    with pytest.raises(ModelNotFound, match="no model"):
        resolve_model(model)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="neither"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_tokenizer_fingerprints_tell_files_apart(tmp_path: Path) -> None:
    one, same, other = (_write_model(tmp_path / name) for name in ("one", "same", "other"))
    (other / "tokenizer.json").write_text("[]")
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same) != tokenizer_fingerprint(other)
