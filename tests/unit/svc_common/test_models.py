"""Files of a model that are not what they should be are named."""

from pathlib import Path

import pytest

from svc_common.models import DamagedModelFile, eos_token_ids_of, find_source, read_json, read_modules


def test_a_file_that_is_missing_has_a_default(tmp_path: Path) -> None:
    assert read_json(tmp_path / "config.json", {"a": 1}) == {"a": 1}
    assert read_modules(tmp_path) == []


@pytest.mark.parametrize("text", ["{", "[]", "3", "null", pytest.param("[" * 100_000, id="deep")])
def test_a_file_that_is_no_object_is_refused_by_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(DamagedModelFile, match=str(path)):
        read_json(path, {})


def test_a_configuration_that_is_not_json_is_named_where_end_tokens_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("no json")
    with pytest.raises(DamagedModelFile, match=r"config\.json cannot be read: Expecting value"):
        eos_token_ids_of(tmp_path)


@pytest.mark.parametrize("data", [b"", b"GGUF\x03\0\0\0", b"garbage" * 9])
def test_a_file_that_is_no_gguf_file_is_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(DamagedModelFile, match=r"model\.gguf is not a GGUF file"):
        find_source(str(path))


@pytest.mark.parametrize("text", ["{}", "[3]", "["])
def test_modules_are_a_list_of_objects(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(DamagedModelFile, match=r"modules\.json"):
        read_modules(tmp_path)
