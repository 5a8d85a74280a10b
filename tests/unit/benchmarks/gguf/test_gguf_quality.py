"""The stretches that llama.cpp's tool scores, and what is judged."""

from benchmarks.gguf.quality import stretches_of, targets


def test_stretches_are_whole_and_score_255_tokens_each() -> None:
    tokens = list(range(1_300))
    stretches = stretches_of(tokens)
    assert [stretch.tokens[0] for stretch in stretches] == [0, 512]
    assert [len(stretch.tokens) - stretch.num_given for stretch in stretches] == [255, 255]


def _of(quire: float = 20.0, quire_bfloat16: float = 20.0) -> dict[str, float]:
    return {"quire": quire, "llama_cpp": 20.0, "quire_bfloat16": quire_bfloat16, "dequantized": 20.0}


def test_a_higher_perplexity_misses_the_bound_and_a_lower_one_does_not() -> None:
    lower, equal, higher = (_of(quire=ours) for ours in (19.0, 20.09, 20.2))
    assert [one["holds"] for one in targets({"a": lower, "b": equal})] == [True, True]
    assert [one["holds"] for one in targets({"a": lower, "b": higher})] == [False, True]


def test_a_perplexity_apart_from_that_of_the_formats_own_numbers_misses_the_bound() -> None:
    for ours, holds in ((19.8, False), (19.95, True), (20.05, True), (20.2, False)):
        assert [one["holds"] for one in targets({"a": _of(), "b": _of(quire_bfloat16=ours)})] == [True, holds]
