"""What tests keep in pytest's cache, because it takes long to make."""

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

_KEPT = Path(__file__).parents[2] / ".pytest_cache" / "d" / "quire"


def kept(name: str, made_by: str, made_of: object, make: Callable[[Path], None]) -> Path:
    """The file or directory that `make` writes at the path it is given: again when its module `made_by`, or what
    `made_of` says, changes. One of several test processes makes it; the others wait.
    """
    digest = hashlib.sha256(Path(made_by).read_bytes() + repr(made_of).encode()).hexdigest()
    path = _KEPT / f"{name}-{digest[:16]}"
    _KEPT.mkdir(parents=True, exist_ok=True)
    with (_KEPT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            draft = path.with_suffix(".draft")
            shutil.rmtree(draft, ignore_errors=True)
            make(draft)
            draft.replace(path)
    return path
