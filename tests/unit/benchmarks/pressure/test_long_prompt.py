"""A round of streams and a long prompt; the target is a scripted one."""

import pytest

from benchmarks.pressure.long_prompt import NUM_STREAMS, run_round
from paced_target import Paced


@pytest.mark.parametrize("number", [0, 1])
async def test_a_turn_has_streams_alone_the_prompt_among_them_and_alone(number: int) -> None:
    target = Paced()
    run = await run_round(target, number, 50)
    assert target.beside == [NUM_STREAMS, 0]
    assert len(set(target.prompts)) == len(target.prompts) == 2 * NUM_STREAMS + 2
    assert 0 < run.alone_p50 <= run.alone_p99
    assert 0 < run.beside_p50 <= run.beside_p99
    assert min(run.first_token_alone, run.first_token_beside) > 0
