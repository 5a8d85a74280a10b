"""What all ways to compute an encoder read: its checkpoint, and the embeddings of words, positions and types."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.tensor_names import StoredTensor
from worker_svc.model.weights import Checkpoint, open_checkpoint


class EncoderEmbeddings(NamedTuple):
    """In the dtype of the checkpoint."""

    words: Tensor
    """[vocab_size, hidden_size]."""
    positions: Tensor
    """[context_length, hidden_size]."""
    types: Tensor
    """[2, hidden_size]; where there is one type, both are the same."""

    def of_places(self, dtype: torch.dtype) -> Tensor:
        """[2 * context_length, hidden_size]: positions with the first type, then with the second, added in a dtype."""
        positions, types = self.positions.to(dtype), self.types.to(dtype)
        return torch.cat([positions + types[0], positions + types[1]])


@contextmanager
def open_encoder(
    description: EncoderDescription, directory: Path, dtype: torch.dtype, device: torch.device
) -> Iterator[Checkpoint]:
    """The checkpoint of a directory, to build an encoder from. Raises UnsupportedModel at the end if tensors are left
    that the description does not name.
    """
    with open_checkpoint(directory, dtype, device) as checkpoint:
        if description.prefix and description.word_embedding not in checkpoint.names:
            prefix = description.prefix
            of_encoder = [name for name in checkpoint.names if name.startswith(prefix)]
            checkpoint.rename({name.removeprefix(prefix): StoredTensor(name) for name in of_encoder})
        yield checkpoint
        checkpoint.drop_prefixes(description.unused_prefixes)


def take_embeddings(description: EncoderDescription, checkpoint: Checkpoint) -> EncoderEmbeddings:
    """Raises UnsupportedModel if tensors do not match the description."""
    hidden, first, num_types = description.hidden_size, description.first_position, description.num_types
    words = checkpoint.take(description.word_embedding, description.vocab_size, hidden)
    positions = checkpoint.take(description.position_embedding, first + description.context_length, hidden)[first:]
    types = checkpoint.take(description.type_embedding, num_types, hidden)
    return EncoderEmbeddings(words, positions, types[[0, min(1, num_types - 1)]])


def token_places(lengths: Sequence[int], num_first: Sequence[int] | None, context_length: int) -> Tensor:
    """The rows of `of_places` that the tokens of prompts have, int64 [num_tokens], on the CPU. `num_first` is how many
    tokens of each prompt are of the first type; None: all.
    """
    places = []
    for length, number in zip(lengths, lengths if num_first is None else num_first, strict=True):
        of_prompt = torch.arange(length)
        of_prompt[number:] += context_length
        places.append(of_prompt)
    return torch.cat(places)
