"""The memory of blocks that are discarded goes back to the system, and only theirs."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from quire_kernels.cpu.large_pages import zeros_in_large_pages
from runner_driver import make_runner
from runner_steps import new_sequence
from worker_svc.block_hashes import BlockHashReport
from worker_svc.memory_parts import _resident_bytes
from worker_svc.page_release import release_blocks
from worker_svc.step import ScheduledSequence, Step

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux returns single pages")
PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("block_bytes", [PAGE, 3 * PAGE, 2 * PAGE + 512, 600])
def test_other_blocks_keep_their_contents(block_bytes: int) -> None:
    blocks = zeros_in_large_pages(64 * block_bytes).view(64, block_bytes)
    blocks.fill_(7)
    discarded = [3, 4, 5, 9, 20, 63]
    release_blocks(blocks, discarded)
    others = [block for block in range(64) if block not in discarded]
    assert bool((blocks[others] == 7).all())
    if block_bytes >= PAGE and block_bytes % PAGE == 0:
        assert not blocks[discarded].any(), "their pages were not returned"
    blocks[discarded] = 9
    assert bool((blocks[discarded] == 9).all())


def test_the_memory_is_returned() -> None:
    blocks = zeros_in_large_pages(256 * 2**20).view(256, 2**20)
    assert _resident_bytes(blocks) < 2**20
    blocks.fill_(1)
    assert _resident_bytes(blocks) == blocks.nbytes
    release_blocks(blocks, range(16, 256))
    assert _resident_bytes(blocks) <= 20 * 2**20
    release_blocks(blocks, [])
    release_blocks(torch.empty(0, 4096, dtype=torch.uint8), [])


def test_a_step_discards_blocks_and_their_hashes(tiny_llama: Path) -> None:
    """A later scheduler must not find them; those that do not exist are left out."""
    runner = make_runner(tiny_llama, num_host_blocks=4)
    hashes = [(block, bytes([block]) * 32) for block in range(4)]
    runner.step(Step([], [], [], block_hashes=hashes, host_block_hashes=hashes))
    runner.step(Step([], [], [], discarded_blocks=[1, 2, 10_000], discarded_host_blocks=[3, 10_000]))
    assert runner.block_hashes.report() == BlockHashReport([hashes[0], hashes[3]], [hashes[0], hashes[1], hashes[2]])


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_sequences_continue_beside_discarded_blocks_and_in_them(kernels: str, tiny_llama: Path) -> None:
    prompt = [1, 2, 3, 4, 5]

    def serve(*, discards: bool) -> list[int]:
        runner = make_runner(tiny_llama, kernels, block_size=8)
        others = [block for block in range(64) if block != 5] if discards else []
        tokens = []
        first = Step([], [new_sequence(1, prompt)], [ScheduledSequence(1, 0, 5, [5])], discarded_blocks=others)
        tokens += runner.step(first).sequences[0].token_ids
        for position in range(5, 12):
            new_blocks = [9] if position == 8 else []
            others = [block for block in others if block != 9]
            step = Step([], [], [ScheduledSequence(1, position, 1, new_blocks)], discarded_blocks=others)
            tokens += runner.step(step).sequences[0].token_ids
        return tokens

    assert serve(discards=True) == serve(discards=False)
