"""A gateway's models are prepared by its own image: configuration and tokenizer, no weights, without torch."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from environments import service_environment
from gateway_svc.model_catalog import CatalogModel
from hub_server import COMMIT, HUB_ID, Hub, serving_hub
from ports import lasting_port
from svc_common.model_settings import ModelSettings
from svc_common.models import DEFAULT_MODEL, ModelNotFound, find_source, tokenizer_fingerprint
from svc_common.preparation import DEFAULT_MODEL_FILES, prepare_files
from tiny_gguf import write_tiny_gguf
from tiny_model import CHAT_TEMPLATE, make_model_directory

FETCHED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}

# What the gateway's image does not have.
_WITHOUT = ("torch", "transformers", "gguf", "safetensors", "worker_svc")
_PROGRAM = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({_WITHOUT}))
runpy.run_module("gateway_svc.prepare", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of this process and of those that it starts, which reach no network."""
    nowhere = f"http://127.0.0.1:{lasting_port()}"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub" / "hub"))
    for name in ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, nowhere)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache"


def prepare(cache: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = service_environment() | {"QUIRE_CACHE_DIR": str(cache), "HF_HUB_DISABLE_XET": "1"} | variables
    command = [sys.executable, "-c", _PROGRAM, *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def prepared(cache: Path, *flags: str, **variables: str) -> list[Path]:
    """The directories of the models."""
    done = prepare(cache, *flags, **variables)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    source = make_model_directory(tmp_path / "published")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    files["chat_template.jinja"] = CHAT_TEMPLATE.encode()
    others = ("model-00001-of-00002.safetensors", "pytorch_model.bin", "modeling.py", "README.md", "original/x.pth")
    with serving_hub(files | dict.fromkeys(others, b"0")) as hub:
        yield hub


def test_the_default_model_needs_no_download(cache: Path) -> None:
    for _ in range(2):
        (directory,) = prepared(cache)
    assert directory == cache / "tokenizers" / DEFAULT_MODEL
    assert {path.name for path in directory.iterdir()} == FETCHED
    assert [path.name for path in directory.parent.iterdir()] == [DEFAULT_MODEL]
    model = CatalogModel.load(ModelSettings(generation_config="model"))
    assert model.tokenizer.chat_template is not None
    assert model.tokenizer.eos_token_ids == (2,)


def test_the_default_model_has_sampling_defaults_of_its_own(cache: Path) -> None:
    (directory,) = prepared(cache)
    assert CatalogModel.load(ModelSettings()).given_defaults == {"temperature": 0.1, "top_p": 0.5}
    assert CatalogModel.load(ModelSettings(generation_config="quire")).given_defaults == {}
    shipped = (directory / "generation_config.json").read_bytes()
    assert shipped == (DEFAULT_MODEL_FILES / "generation_config.json").read_bytes()


def test_a_generation_config_of_an_earlier_release_is_replaced(cache: Path) -> None:
    complete = make_model_directory(cache / "models" / DEFAULT_MODEL)
    path = complete / "generation_config.json"
    path.write_text('{"eos_token_id": 2}')
    files = {each.name for each in complete.iterdir()}
    prepared(cache)
    assert CatalogModel.load(ModelSettings()).given_defaults == {"temperature": 0.1, "top_p": 0.5}
    assert {each.name for each in complete.iterdir()} == files


def test_a_generation_config_that_cannot_be_replaced_is_reported(cache: Path) -> None:
    path = make_model_directory(cache / "models" / DEFAULT_MODEL) / "generation_config.json"
    path.unlink()
    path.mkdir()
    lines: list[str] = []
    prepare_files(find_source(None), lambda _: None, lines.append)
    (line,) = lines
    assert line.startswith(f"{path} is that of an earlier release and cannot be replaced: ")


def test_what_a_worker_prepared_of_the_default_model_is_read_instead(cache: Path) -> None:
    complete = make_model_directory(cache / "models" / DEFAULT_MODEL)
    assert prepared(cache) == [complete]
    assert not (cache / "tokenizers").exists()


def test_a_worker_does_not_take_a_gateways_files_for_a_model(cache: Path) -> None:
    prepared(cache)
    directory = find_source(None).directory()
    assert directory is not None
    assert not directory.exists()


def test_of_a_hub_id_only_configuration_and_tokenizer_are_downloaded(cache: Path, hub: Hub) -> None:
    for _ in range(2):
        (directory,) = prepared(cache, "--model", HUB_ID, HF_ENDPOINT=hub.url, HF_TOKEN="secret")
    assert sorted(hub.downloads) == sorted(FETCHED)
    assert "Bearer secret" in hub.tokens
    assert (directory.name, {path.name for path in directory.iterdir()}) == (COMMIT, FETCHED)
    model = CatalogModel.load(ModelSettings(model=HUB_ID))
    assert model.name == HUB_ID
    assert model.tokenizer.chat_template is not None
    assert model.tokenizer_fingerprint == tokenizer_fingerprint(directory)


def test_a_mounted_directory_is_read_where_it_is(cache: Path, tmp_path: Path) -> None:
    mounted = make_model_directory(tmp_path / "mounted")
    (mounted / "model.safetensors").unlink()  # gateways need no weights
    assert prepared(cache, QUIRE_MODEL=str(mounted)) == [mounted]
    assert not cache.exists()
    CatalogModel.load(ModelSettings(model=str(mounted)))
    (mounted / "config.json").unlink()
    done = prepare(cache, QUIRE_MODEL=str(mounted))
    assert (done.returncode, done.stderr) == (1, f"quire: {mounted} is not a model directory: it has no config.json\n")


def test_a_tokenizer_of_its_own_is_prepared_too(cache: Path, tmp_path: Path, hub: Hub) -> None:
    mounted = make_model_directory(tmp_path / "mounted")
    (mounted / "tokenizer.json").unlink()
    prepared(cache, "--model", str(mounted), "--tokenizer", HUB_ID, HF_ENDPOINT=hub.url)
    assert sorted(hub.downloads) == sorted(FETCHED)
    CatalogModel.load(ModelSettings(model=str(mounted), tokenizer=HUB_ID))


def test_all_models_of_a_file_are_prepared(cache: Path, tmp_path: Path, hub: Hub) -> None:
    file = tmp_path / "models.toml"
    mounted = make_model_directory(tmp_path / "mounted")
    file.write_text(f'[[models]]\n[[models]]\nmodel = "{mounted}"\n[[models]]\nmodel = "{HUB_ID}"\n')
    default, second, third = prepared(cache, QUIRE_MODELS=str(file), HF_ENDPOINT=hub.url)
    assert (default.name, second, third.name) == (DEFAULT_MODEL, mounted, COMMIT)
    file.write_text('[[models]]\n[[models]]\nmodel = "owner/other"\n')
    done = prepare(cache, QUIRE_MODELS=str(file), HF_ENDPOINT=hub.url)
    assert done.returncode == 1
    assert f"quire: {file}: models[1]: cannot download owner/other" in done.stderr


def test_only_a_worker_converts_gguf_files(cache: Path, tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    done = prepare(cache, "--model", str(gguf))
    assert done.returncode == 1
    assert f"run `python -m worker_svc.prepare {gguf}` first" in done.stderr
    converted = find_source(str(gguf)).directory()
    assert converted is not None
    assert prepared(cache, "--model", str(make_model_directory(converted))) == [converted]
    assert prepared(cache, "--model", str(gguf)) == [converted]


def test_a_gateway_names_what_to_run(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"run `python -m gateway_svc\.prepare` first"):
        ModelSettings().resolve()
    settings = ModelSettings(model=HUB_ID, revision="v1", tokenizer="other/one")
    with pytest.raises(ModelNotFound, match=r"prepare --model owner/name --revision v1 --tokenizer other/one`"):
        settings.resolve()


def test_the_shipped_files_are_those_of_the_default_model(cache: Path) -> None:
    (directory,) = prepared(cache)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "config.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == config["vocab_size"] == 49_152
