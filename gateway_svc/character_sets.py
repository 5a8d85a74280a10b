"""Sets of characters as sorted ranges of code points, with both ends."""

from collections.abc import Iterable

CharacterSet = tuple[tuple[int, int], ...]
"""Without adjacent ranges."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


def union(*sets: Iterable[tuple[int, int]]) -> CharacterSet:
    """All characters of these sets, whose ranges may be in any order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(each for one in sets for each in one):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def complement(characters: CharacterSet) -> CharacterSet:
    """All other characters."""
    found, low = [], 0
    for begin, end in union(characters, [_SURROGATES]):
        if low < begin:
            found.append((low, begin - 1))
        low = end + 1
    if low <= _LAST:
        found.append((low, _LAST))
    return tuple(found)


def overlap(one: CharacterSet, other: CharacterSet) -> bool:
    """Whether they have a character in common."""
    first = second = 0
    while first < len(one) and second < len(other):
        if one[first][1] < other[second][0]:
            first += 1
        elif other[second][1] < one[first][0]:
            second += 1
        else:
            return True
    return False


ALL = complement(())
