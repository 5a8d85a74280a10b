"""The hashes of sequences: of a prompt that several share, each is computed once."""

import pytest

from core_bench import BLOCK, CoreBench, prompt
from scheduler_svc.core.kv import prefix_cache
from scheduler_svc.core.kv.prefix_index import extend_hashes, root_hash


@pytest.mark.parametrize("num_more", [0, 1, BLOCK - 1])
def test_the_prompt_of_siblings_is_hashed_once(num_more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0

    def counting(hashes: list[bytes], *args: object) -> None:
        nonlocal num_hashed
        num_before = len(hashes)
        extend_hashes(hashes, *args)  # type: ignore[arg-type]
        num_hashed += len(hashes) - num_before

    monkeypatch.setattr(prefix_cache, "extend_hashes", counting)
    bench = CoreBench()
    num_siblings, num_output = 6, 3 * BLOCK
    siblings = bench.submit("a", prompt(10 * BLOCK + num_more), num_output, n=num_siblings)
    while any(not sibling.num_output for sibling in siblings):
        bench.step()
    assert num_hashed <= 10 + num_siblings  # each sibling may have filled one block by then
    bench.run()
    own = [list(sibling.block_hashes) for sibling in siblings]
    assert all(hashes[:10] == own[0][:10] for hashes in own)
    for sibling, hashes in zip(siblings, own, strict=True):
        expected: list[bytes] = []
        root = root_hash(bench.replica.shape.fingerprint, sibling.request.salt)
        extend_hashes(expected, root, sibling.tokens, BLOCK, len(hashes))
        assert hashes == expected
