"""What all ways to compute an encoder read: its checkpoint, the embeddings of words, positions and types, and what
attention depends on beside them.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from worker_svc.model.encoder_description import EncoderDescription, RelativePositions
from worker_svc.model.tensor_names import StoredTensor
from worker_svc.model.weights import Checkpoint, open_checkpoint


class EncoderEmbeddings(NamedTuple):
    """In the dtype of the checkpoint."""

    words: Tensor
    """[vocab_size, hidden_size]."""
    positions: Tensor | None
    """[context_length, hidden_size]; None: they are rotary."""
    types: Tensor
    """[2, hidden_size]; where there is one type, both are the same."""

    def of_places(self, dtype: torch.dtype) -> Tensor:
        """[2 * context_length, hidden_size]: positions with the first type, then with the second, added in a dtype.
        Without learnt positions, the types.
        """
        types = self.types.to(dtype)
        if self.positions is None:
            return types
        positions = self.positions.to(dtype)
        return torch.cat([positions + types[0], positions + types[1]])


@contextmanager
def open_encoder(
    description: EncoderDescription, directory: Path, dtype: torch.dtype, device: torch.device
) -> Iterator[Checkpoint]:
    """The checkpoint of a directory, to build an encoder from. Raises UnsupportedModel at the end if tensors are left
    that the description does not name.
    """
    with open_checkpoint(directory, dtype, device) as checkpoint:
        is_whole = bool(description.prefix) and f"{description.prefix}{description.word_embedding}" in checkpoint.names
        prefix = description.prefix if is_whole else ""
        of_encoder = [name for name in checkpoint.names if name.startswith(prefix)]
        checkpoint.rename({_current(name.removeprefix(prefix)): StoredTensor(name) for name in of_encoder})
        yield checkpoint
        checkpoint.drop_prefixes(description.unused_prefixes)


def _current(name: str) -> str:
    """The name of a tensor, as transformers has them since 2019."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return f"{name.removesuffix(old)}{new}"
    return name


def take_embeddings(description: EncoderDescription, checkpoint: Checkpoint) -> EncoderEmbeddings:
    """Raises UnsupportedModel if tensors do not match the description."""
    hidden, first, num_types = description.hidden_size, description.first_position, description.num_types
    words = checkpoint.take(description.word_embedding, description.vocab_size, hidden)
    positions = None
    if description.position_embedding is not None:
        positions = checkpoint.take(description.position_embedding, first + description.context_length, hidden)[first:]
    if description.type_embedding is None:
        return EncoderEmbeddings(words, positions, words.new_zeros(2, hidden))
    types = checkpoint.take(description.type_embedding, num_types, hidden)
    return EncoderEmbeddings(words, positions, types[[0, min(1, num_types - 1)]])


def take_distance_scores(
    relative: RelativePositions, num_heads: int, context_length: int, checkpoint: Checkpoint
) -> Tensor:
    """What is added to the scores of each head, by the distance of a key from its query, [num_heads,
    2 * context_length - 1]: a query's own key is in the middle, and keys before it are before that.

    Raises UnsupportedModel if the tensor does not match the description.
    """
    weight = checkpoint.take(relative.weight, relative.num_buckets, num_heads)
    distances = torch.arange(1 - context_length, context_length)
    return weight[_buckets(distances, relative).to(weight.device)].T.contiguous()


def _buckets(distances: Tensor, relative: RelativePositions) -> Tensor:
    """The bucket of each distance of a key from its query, which is negative for keys before it. Source: T5,
    https://arxiv.org/abs/1910.10683, section 2.1.
    """
    half = relative.num_buckets // 2
    num_near = half // 2
    lengths = distances.abs()
    share = (lengths.clamp(min=1) / num_near).log() / math.log(relative.max_distance / num_near)
    far = (num_near + (share * (half - num_near)).long()).clamp(max=half - 1)
    return torch.where(lengths < num_near, lengths, far) + half * (distances > 0)


def token_positions(lengths: Sequence[int]) -> Tensor:
    """Of the tokens of prompts, int64 [num_tokens], on the CPU."""
    return torch.cat([torch.arange(length) for length in lengths])


def token_places(lengths: Sequence[int], num_first: Sequence[int] | None, num_positions: int | None) -> Tensor:
    """The rows of `of_places` that the tokens of prompts have, int64 [num_tokens], on the CPU. `num_first` is how many
    tokens of each prompt are of the first type; None: all. `num_positions`: how many are learnt; None: none.
    """
    positions = token_positions(lengths)
    firsts = torch.tensor(lengths if num_first is None else num_first)
    is_second = (positions >= firsts.repeat_interleave(torch.tensor(lengths))).long()
    return is_second if num_positions is None else positions + is_second * num_positions
