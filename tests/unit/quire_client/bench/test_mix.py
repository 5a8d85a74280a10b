"""The composition of a load."""

import math
import random
from pathlib import Path

import pytest

from quire_client.bench.mix import MixError, MixRequest, log_uniform, read_mix, sample_lengths, sample_mix, take

COMMITTED_MIX = Path(__file__).parents[4] / "benchmarks" / "mix.json"


def test_log_uniform_lengths_are_as_many_in_each_doubling() -> None:
    rng = random.Random(0)
    lengths = [log_uniform(rng, 16, 1024) for _ in range(6000)]
    doublings = [sum(16 * 2**k <= length < 32 * 2**k for length in lengths) for k in range(6)]

    assert min(lengths) == 16
    assert max(lengths) <= 1024
    assert all(math.isclose(count, 1000, rel_tol=0.15) for count in doublings)


def test_a_seed_gives_the_same_mix_again_and_another_seed_another() -> None:
    assert sample_mix(3, 5, None) == sample_mix(3, 5, None)
    assert sample_mix(3, 5, None) != sample_mix(4, 5, None)


@pytest.mark.parametrize("vocab_size", [2, 257, 2_001, 49_152, None])
def test_drawn_tokens_are_in_the_vocabulary(vocab_size: int | None) -> None:
    ids = {token_id for request in sample_mix(0, 20, vocab_size) for token_id in request.prompt_token_ids}

    assert max(ids) < (vocab_size or 20_000)


def test_a_mix_is_cut_or_repeated() -> None:
    mix = sample_mix(0, 3, None)

    assert take(mix, None) == mix
    assert take(mix, 2) == mix[:2]
    assert take(mix, 5) == [*mix, *mix[:2]]


def test_a_written_mix_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    path.write_text('{"requests": [{"prompt_token_ids": [0, 7], "output_tokens": 3}], "seed": 0}')

    assert read_mix(path) == [MixRequest((0, 7), 3)]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"requests": []}',
        '{"requests": [{"output_tokens": 3}]}',
        '{"requests": [{"prompt_token_ids": [], "output_tokens": 3}]}',
        '{"requests": [{"prompt_token_ids": [1.5], "output_tokens": 3}]}',
        '{"requests": [{"prompt_token_ids": [-1], "output_tokens": 3}]}',
        '{"requests": [{"prompt_token_ids": "ab", "output_tokens": 3}]}',
        '{"requests": [{"prompt_token_ids": [1], "output_tokens": 0}]}',
        '{"requests": [{"prompt_token_ids": [1], "output_tokens": true}]}',
        pytest.param(100_000 * "[", id="nested"),
    ],
)
def test_what_is_no_mix_is_refused_by_file_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mix.json"
    path.write_text(content)

    with pytest.raises(MixError, match=r"mix\.json"):
        read_mix(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MixError, match=r"gone\.json: no such file"):
        read_mix(tmp_path / "gone.json")


def test_the_committed_mix_has_the_lengths_of_its_seed() -> None:
    lengths = [(len(request.prompt_token_ids), request.output_tokens) for request in read_mix(COMMITTED_MIX)]

    assert lengths == sample_lengths(0, 48)
    assert all(16 <= prompt <= 800 and 16 <= output <= 256 for prompt, output in lengths)


def test_no_two_prompts_of_the_committed_mix_begin_alike() -> None:
    beginnings = {request.prompt_token_ids[:8] for request in read_mix(COMMITTED_MIX)}

    assert len(beginnings) == 48  # otherwise a prefix cache would save part of the work
