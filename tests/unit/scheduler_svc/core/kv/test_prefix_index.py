"""Blocks are found by their tokens and all earlier tokens."""

from scheduler_svc.core.kv.prefix_index import BlockContent, PrefixIndex, extend_hashes, pack_block, root_hash

SIZE = 4
ROOT = root_hash(b"model", b"salt")


def hashes(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    chain: list[bytes] = []
    extend_hashes(chain, root, tokens, SIZE, len(tokens) // SIZE)
    return chain


def filled(tokens: list[int], first_id: int = 0) -> PrefixIndex:
    index = PrefixIndex(SIZE)
    for block, block_hash in enumerate(hashes(tokens)):
        index.publish(first_id + block, BlockContent(block_hash, pack_block(tokens, block, SIZE)))
    return index


def test_root_hash_differs_by_model_and_salt() -> None:
    roots = {root_hash(*pair) for pair in ((b"a", b"b"), (b"a", b"c"), (b"d", b"b"), (b"ab", b""), (b"", b"ab"))}
    assert len(roots) == 5


def test_hashes_do_not_depend_on_how_they_are_extended() -> None:
    tokens = list(range(16))
    chain: list[bytes] = []
    for num_blocks in (1, 3, 4):
        extend_hashes(chain, ROOT, tokens, SIZE, num_blocks)
    assert chain == hashes(tokens)


def test_same_tokens_behind_another_prefix_have_another_hash() -> None:
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes([1, 2, 3, 0, 5, 6, 7, 8])[1]
    assert hashes([1, 2, 3, 4])[0] != hashes([1, 2, 3, 4], root_hash(b"model", b"other"))[0]


def test_longest_run_is_found() -> None:
    index = filled(list(range(16)), first_id=10)
    other = [*range(11), 99, *range(12, 16)]
    assert index.match(hashes(list(range(16))), list(range(16))) == [10, 11, 12, 13]
    assert index.match(hashes(other), other) == [10, 11]


def test_run_may_begin_behind_another_tiers_blocks() -> None:
    tokens = list(range(16))
    index = filled(tokens, first_id=10)
    index.forget([10])
    assert index.match(hashes(tokens), tokens) == []
    assert index.match(hashes(tokens), tokens, first=1) == [11, 12, 13]


def test_same_hash_of_other_tokens_is_no_hit() -> None:
    index = PrefixIndex(SIZE)
    index.publish(0, BlockContent(hashes([1, 2, 3, 4])[0], pack_block([9, 9, 9, 9], 0, SIZE)))
    assert index.match(hashes([1, 2, 3, 4]), [1, 2, 3, 4]) == []
    assert index.find(BlockContent(hashes([1, 2, 3, 4])[0], pack_block([1, 2, 3, 4], 0, SIZE))) is None


def test_second_block_of_a_hash_is_not_added() -> None:
    index = filled([1, 2, 3, 4], first_id=5)
    content = index.content(5)
    assert index.publish(6, content) == 5
    assert index.find(content) == 5
    assert 6 not in index


def test_hash_of_a_forgotten_block_can_be_published_again() -> None:
    index = filled([1, 2, 3, 4], first_id=5)
    content = index.content(5)
    index.forget([5])
    assert index.find(content) is None
    assert index.publish(6, content) == 6
