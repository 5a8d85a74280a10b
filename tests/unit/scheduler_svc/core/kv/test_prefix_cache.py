"""The hashes of sequences: of a prompt that several share, each is computed once."""

import pytest

from core_bench import BLOCK, EMBEDDING, SHAPE, CoreBench, prompt
from scheduler_svc.core.kv import prefix_cache
from scheduler_svc.core.kv.prefix_index import extend_hashes, root_hash
from scheduler_svc.core.results import PROMPT_LOGPROBS, PromptComputation


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


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("num_found", range(11))
def test_cached_blocks_are_counted_without_hashing_the_whole_prompt(num_found: int, on_host: bool) -> None:
    bench = CoreBench()
    tokens = prompt(10 * BLOCK + 2)
    if num_found:
        bench.submit("before", tokens[: num_found * BLOCK], 1)
        bench.run()
    kv = bench.replica.kv
    if on_host:
        for block_id in sorted(kv.device.index.block_ids)[num_found // 2 :]:
            kv.host.index.publish(block_id, kv.device.index.content(block_id))
            kv.device.index.forget([block_id])
    [sequence] = bench.submit("a", tokens)
    assert kv.num_cached_blocks(sequence) == num_found
    assert len(sequence.block_hashes) <= min(10, 2 * num_found + 1)


def test_no_cached_blocks_are_counted_of_what_is_computed_again() -> None:
    results = {**SHAPE.results, EMBEDDING.name: PromptComputation.INDIVISIBLE}
    bench = CoreBench(results=results)
    tokens = prompt(10 * BLOCK)
    bench.submit("before", tokens, 1)
    bench.run()
    kv = bench.replica.kv
    assert kv.num_cached_blocks(bench.submit_for_value("text", tokens)) == 0
    assert kv.num_cached_blocks(bench.submit("scored", tokens, result=PROMPT_LOGPROBS)[0]) == 0
    assert kv.num_cached_blocks(bench.submit("short", tokens[: BLOCK - 1])[0]) == 0
