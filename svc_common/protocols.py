"""Versions of the inner protocols and of the records in Redis.

Each side of a connection sends the versions that it accepts, and both use the newest common one. So roles of two
releases work together during an upgrade or a rollback, as long as their ranges overlap. A change that the other side
may ignore needs no new version.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The versions that this release accepts, from `oldest` to `newest`."""

    oldest: int
    newest: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest

    def newest_common(self, oldest: int, newest: int) -> int | None:
        """The version to use with a side that accepts `oldest` to `newest`; None: there is none.

        0 counts as 1: a side of version 1 does not have these fields.
        """
        common = min(self.newest, max(newest, 1))
        return common if common >= max(self.oldest, oldest, 1) else None

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"


SESSION_PROTOCOLS = ProtocolRange(1, 4)
"""Gateway and scheduler. 2: several models, each submission names one; answers of chats have a format. 3: requests have
attachments, may run in the background, return their prompt, and have allowed tokens, bad words and grammars; records
can be read and removed. 4: a message may have several commands."""

STEP_PROTOCOLS = ProtocolRange(1, 3)
"""Scheduler and worker. 2: results other than tokens, typical_p, grammars. 3: the worker forgets a sequence when it
returns its value."""

RECORD_VERSIONS = ProtocolRange(1, 3)
"""Records of requests in Redis. 2: a request names its model, and has results other than tokens. 3: encrypted."""
