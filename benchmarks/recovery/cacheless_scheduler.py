"""The scheduler without the block-hash report: after a takeover it restores no cached block."""

from scheduler_svc.__main__ import main
from scheduler_svc.core.kv.manager import KVManager


def restore_nothing(*_: object) -> int:
    return 0


if __name__ == "__main__":
    KVManager.restore_cached_blocks = restore_nothing  # type: ignore[method-assign, assignment]
    main()
