"""Files of a model that are not what they should be are named."""

from pathlib import Path

import pytest

from svc_common.models import DamagedModelFile, read_json, read_modules


def test_a_file_that_is_missing_has_a_default(tmp_path: Path) -> None:
    assert read_json(tmp_path / "config.json", {"a": 1}) == {"a": 1}
    assert read_modules(tmp_path) == []


@pytest.mark.parametrize("text", ["{", "[]", "3", "null"])
def test_a_file_that_is_no_object_is_refused_by_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(DamagedModelFile, match=str(path)):
        read_json(path, {})


@pytest.mark.parametrize("text", ["{}", "[3]", "["])
def test_modules_are_a_list_of_objects(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(DamagedModelFile, match=r"modules\.json"):
        read_modules(tmp_path)
