"""A cgroup of this program's own, beyond whose limit the kernel kills. It needs root, or a delegated folder."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from worker_svc.host_memory import CGROUPS, PROC


@dataclass(frozen=True)
class Cgroup:
    """A folder of cgroup v1's memory controller, or of cgroup v2."""

    folder: Path
    is_v2: bool

    @property
    def limit_file(self) -> Path:
        return self.folder / ("memory.max" if self.is_v2 else "memory.limit_in_bytes")

    def set_limit(self, num_bytes: int) -> None:
        """The kernel rounds it down to whole pages."""
        self.limit_file.write_text(str(num_bytes))

    @property
    def limit(self) -> int | None:
        """Bytes, as the kernel reports them; None: no limit."""
        text = self.limit_file.read_text().strip()
        return None if text == "max" else int(text)

    @property
    def num_processes(self) -> int:
        """How many processes run here."""
        return len((self.folder / "cgroup.procs").read_text().split())

    @property
    def num_killed(self) -> int:
        """How many processes the kernel has killed here for memory."""
        text = (self.folder / ("memory.events" if self.is_v2 else "memory.oom_control")).read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    @property
    def launcher(self) -> tuple[str, ...]:
        """A command that runs its arguments here."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))


@contextmanager
def own_cgroup() -> Iterator[Cgroup | None]:
    """A new cgroup without a limit, which is removed at the end. None: this process may not make one."""
    made = _make_cgroup()
    try:
        yield made
    finally:
        for _ in range(50 if made is not None else 0):
            with suppress(OSError):
                made.folder.rmdir()  # type: ignore[union-attr]
                break
            time.sleep(0.1)  # its processes are ending


def _make_cgroup() -> Cgroup | None:
    for parent, is_v2 in _parents():
        folder = parent / f"quire-memory-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            made = Cgroup(folder, is_v2)
            if made.limit_file.exists():
                return made
            folder.rmdir()
    return None


def _parents() -> Iterator[tuple[Path, bool]]:
    """Where to try: below this process's own cgroups, then below those around them.

    A cgroup of version 2 that has processes has no controllers for those below it, so there the new one is beside it.
    """
    for line in (PROC / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2 = not controllers
        if is_v2 or "memory" in controllers.split(","):
            root = CGROUPS if is_v2 else CGROUPS / "memory"
            own = root / path.lstrip("/")
            yield from ((folder, is_v2) for folder in (own, *own.parents) if folder.is_relative_to(root))
