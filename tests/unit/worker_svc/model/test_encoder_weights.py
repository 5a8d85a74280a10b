"""Which rows of the embeddings of places a token has."""

import torch

from worker_svc.model.encoder_weights import EncoderEmbeddings, token_places


def test_places_of_the_first_type_then_of_the_second() -> None:
    assert token_places([3, 2], [1, 2], num_positions=10).tolist() == [0, 11, 12, 0, 1]


def test_without_numbers_all_tokens_are_of_the_first_type() -> None:
    assert token_places([2, 1], None, num_positions=10).tolist() == [0, 1, 0]


def test_without_learnt_positions_a_token_has_the_row_of_its_type() -> None:
    assert token_places([3, 2], [1, 2], num_positions=None).tolist() == [0, 1, 1, 0, 0]
    embeddings = EncoderEmbeddings(torch.zeros(1, 1), None, torch.tensor([[1.0], [2.0]]))
    assert embeddings.of_places(torch.bfloat16).tolist() == [[1.0], [2.0]]


def test_sums_are_of_the_asked_dtype() -> None:
    position, small = torch.tensor([[1.0]], dtype=torch.bfloat16), torch.tensor([[2.0**-9], [0.0]]).bfloat16()
    embeddings = EncoderEmbeddings(torch.zeros(1, 1), position, small)
    assert embeddings.of_places(torch.float32).tolist() == [[1 + 2.0**-9], [1.0]]
    assert embeddings.of_places(torch.bfloat16).tolist() == [[1.0], [1.0]]
