"""The state file."""

import json
from pathlib import Path

from svc_common.supervisor.state import StateFile


def test_it_is_replaced_at_each_change_and_private(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state = StateFile(path, {"supervisor": 7})
    state.write({"ready": False})
    state.write({"ready": True})
    assert json.loads(path.read_text()) == {"supervisor": 7, "ready": True}
    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]
    state.remove()
    assert not path.exists()
