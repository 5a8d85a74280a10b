"""The versions of Redis that Quire works with."""

import re

LEAST = (6, 2)
LEAST_TEXT = "6.2"


def is_too_old(version: str) -> bool:
    """Whether a version, such as 6.2.14, is below the least one."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < LEAST
