"""The default model's configuration is complete wherever it exists, also where several processes write it."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from svc_common import preparation
from svc_common.models import DEFAULT_MODEL, ModelSource, find_source
from svc_common.preparation import DEFAULT_MODEL_FILES, prepare_files


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    return replace(find_source(None), with_weights=False)


def _never(directory: Path) -> None:
    pytest.fail(f"{directory} was checked")


def test_of_several_that_write_at_once_all_succeed(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)
    write, failed = preparation._write_default_model, list[BaseException]()

    def write_together(directory: Path) -> None:
        together.wait()  # both have found that it is missing
        write(directory)

    def run() -> None:
        try:
            prepare_files(source, _never, print)
        except BaseException as error:
            failed.append(error)

    monkeypatch.setattr(preparation, "_write_default_model", write_together)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [path.name for path in (tmp_path / "tokenizers").iterdir()] == [DEFAULT_MODEL]
    names = {path.name.removesuffix(".xz") for path in DEFAULT_MODEL_FILES.iterdir()}
    assert {path.name for path in (tmp_path / "tokenizers" / DEFAULT_MODEL).iterdir()} == names


def test_a_write_that_fails_leaves_nothing_behind(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(OSError, match="no space left"):
        prepare_files(source, _never, print)
    assert list((tmp_path / "tokenizers").iterdir()) == []
