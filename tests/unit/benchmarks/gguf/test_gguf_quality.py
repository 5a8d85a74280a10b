"""The stretches that llama.cpp's tool scores."""

from benchmarks.gguf.quality import stretches_of


def test_stretches_are_whole_and_score_255_tokens_each() -> None:
    tokens = list(range(1_300))
    stretches = stretches_of(tokens)
    assert [stretch.tokens[0] for stretch in stretches] == [0, 512]
    assert [len(stretch.tokens) - stretch.num_given for stretch in stretches] == [255, 255]
