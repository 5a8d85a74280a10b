"""A model is found by its setting, and the error for a missing one says what to do."""

import shlex
from pathlib import Path

import huggingface_hub.constants
import pytest

from svc_common.models import (
    DEFAULT_MODEL,
    ModelNotFound,
    ServedModel,
    find_source,
    resolve_model,
    tokenizer_fingerprint,
)

GGUF = b"GGUF" + bytes(20)
"""A header without contents."""


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


def test_a_model_is_served_under_the_names_of_the_settings(tmp_path: Path) -> None:
    directory, other = _write_model(tmp_path / "mine"), _write_model(tmp_path / "other")
    served = resolve_model(str(directory), served_names=("one", "two", "three"))
    assert served == ServedModel("one", directory, aliases=("two", "three"))
    assert resolve_model(str(directory), tokenizer=str(other), served_names=("one",)) == ServedModel(
        "one", directory, other
    )


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_without_a_file_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    directory = _write_model(tmp_path / "mine")
    (directory / name).unlink()
    with pytest.raises(ModelNotFound, match=name):
        resolve_model(str(directory))


def test_a_gguf_file_is_served_under_its_stem_from_the_cache(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "tiny.Q4.gguf"
    gguf.write_bytes(GGUF)
    with pytest.raises(ModelNotFound, match=rf"prepare {gguf}"):
        resolve_model(str(gguf))
    directory = find_source(str(gguf)).directory()
    assert directory is not None
    assert directory.parent == cache
    _write_model(directory)
    assert resolve_model(str(gguf)).name == "tiny.Q4"


def test_gguf_files_of_one_name_are_different_models(tmp_path: Path) -> None:
    directories = set()
    for place, content in (("a", GGUF), ("b", GGUF), ("b", GGUF + b"2")):
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


def test_tokenizer_fingerprints_depend_on_the_files(tmp_path: Path) -> None:
    one, same, other = (_write_model(tmp_path / name) for name in ("one", "same", "other"))
    (other / "tokenizer.json").write_text("[]")
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same) != tokenizer_fingerprint(other)


COMMITS = {"main": "0" * 40, "v1": "1" * 40}


def _write_hub(tmp_path: Path, hub_id: str = "owner/name") -> dict[str, Path]:
    """A cached repository with two revisions; their directories, by branch or tag."""
    repository = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in COMMITS.items():
        (repository / "refs" / revision).write_text(commit)
    return {name: _write_model(repository / "snapshots" / commit) for name, commit in COMMITS.items()}


@pytest.mark.parametrize(("revision", "found"), [(None, "main"), ("", "main"), ("v1", "v1"), ("1" * 40, "v1")])
def test_a_revision_of_a_hub_id_is_a_branch_tag_or_commit(revision: str | None, found: str, tmp_path: Path) -> None:
    directories = _write_hub(tmp_path)
    assert resolve_model("owner/name", revision) == ServedModel("owner/name", directories[found])


def test_a_revision_that_is_not_there_is_said_with_what_to_run(tmp_path: Path) -> None:
    _write_hub(tmp_path)
    with pytest.raises(ModelNotFound, match=r"owner/name at revision v2 .*prepare owner/name --revision v2`"):
        resolve_model("owner/name", "v2")


def test_only_hub_ids_have_revisions(tmp_path: Path) -> None:
    directory = str(_write_model(tmp_path / "mine"))
    for model in (None, directory):
        with pytest.raises(ModelNotFound, match="QUIRE_REVISION is v1"):
            resolve_model(model, "v1")
    for tokenizer in (None, directory, str(_write_model(tmp_path / "other"))):
        with pytest.raises(ModelNotFound, match="QUIRE_TOKENIZER_REVISION is v1"):
            resolve_model(directory, None, tokenizer, "v1")


def test_a_tokenizer_may_come_from_another_directory_or_hub_id(tmp_path: Path) -> None:
    model = _write_model(tmp_path / "mine")
    (model / "tokenizer.json").unlink()  # nor is the model's own needed then
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    served = resolve_model(str(model), tokenizer=str(other))
    assert (served.name, served.path, served.tokenizer_path) == ("mine", model, other)
    directories = _write_hub(tmp_path)
    assert resolve_model(str(model), tokenizer="owner/name").tokenizer_path == directories["main"]
    assert resolve_model(str(model), None, "owner/name", "v1").tokenizer_path == directories["v1"]


@pytest.mark.parametrize(
    ("revision", "tokenizer", "tokenizer_revision", "found"),
    [
        ("v1", None, None, "v1"),
        ("v1", "owner/name", None, "v1"),
        ("v1", None, "main", "main"),
        (None, "owner/name", "v1", "v1"),
    ],
)
def test_the_models_own_tokenizer_has_its_revision_by_default(
    revision: str | None, tokenizer: str | None, tokenizer_revision: str | None, found: str, tmp_path: Path
) -> None:
    directories = _write_hub(tmp_path)
    served = resolve_model("owner/name", revision, tokenizer, tokenizer_revision)
    assert served.path == directories[revision or "main"]
    assert served.tokenizer_path == directories[found]


def test_another_models_tokenizer_is_not_of_the_models_revision(tmp_path: Path) -> None:
    _write_hub(tmp_path)
    other = _write_hub(tmp_path, "other/one")
    assert resolve_model("owner/name", "v1", "other/one").tokenizer_path == other["main"]


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    model = str(_write_model(tmp_path / "mine"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"QUIRE_TOKENIZER: .*empty .* no tokenizer\.json"):
        resolve_model(model, tokenizer=str(tmp_path / "empty"))
    with pytest.raises(ModelNotFound, match=r"QUIRE_TOKENIZER: there is no model at \./gone"):
        resolve_model(model, tokenizer="./gone")
    with pytest.raises(ModelNotFound, match=r"tokenizer owner/name .*prepare .*mine --tokenizer owner/name`"):
        resolve_model(model, tokenizer="owner/name")


def test_a_tokenizers_revision_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    directories = _write_hub(tmp_path)
    (directories["v1"] / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"^QUIRE_TOKENIZER_REVISION: .* no tokenizer\.json"):
        resolve_model("owner/name", tokenizer_revision="v1")
    with pytest.raises(ModelNotFound, match=r"^QUIRE_TOKENIZER: .* no tokenizer\.json"):
        resolve_model("owner/name", tokenizer="owner/name", tokenizer_revision="v1")


def test_the_reported_command_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    gguf = tmp_path / "my models; $HOME" / "it's.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(GGUF)
    with pytest.raises(ModelNotFound) as raised:
        resolve_model(str(gguf), tokenizer="owner/name", tokenizer_revision="a b")
    command = str(raised.value).split("`")[1]
    arguments = [str(gguf), "--tokenizer", "owner/name", "--tokenizer-revision", "a b"]
    assert shlex.split(command) == ["python", "-m", "worker_svc.prepare", *arguments]
