"""An encoder as plain values, as `description` has decoders."""

from collections.abc import Iterator
from dataclasses import dataclass

from worker_svc.model.description import LinearLayer, MlpSpec, RopeConfig, require
from worker_svc.model.linear_description import require_epsilon
from worker_svc.model.score_head_description import ScoreHeadSpec


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm over the last dimension: the checkpoint's tensors `name`.weight and `name`.bias, each [size]."""

    name: str
    size: int
    eps: float

    def __post_init__(self) -> None:
        require_epsilon(self.name, self.eps)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """x = norm(x + attention(x)), then x = norm(x + mlp(x)). Every token sees all tokens of its prompt."""

    qkv: LinearLayer
    output: LinearLayer
    attention_norm: LayerNorm
    mlp: MlpSpec
    mlp_norm: LayerNorm


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """A relative position bias: what is added to the attention scores of each head, by the distance of a key from its
    query, in all layers alike.

    Keys before the query and those after it have half of the `num_buckets` each. Near distances have a bucket of their
    own; from `num_buckets` / 4 on, buckets cover longer and longer ranges; the last one has all from `max_distance` on.
    """

    weight: str
    """The checkpoint's tensor [num_buckets, num_heads]."""
    num_buckets: int
    max_distance: int

    def __post_init__(self) -> None:
        require(self.num_buckets >= 4 and self.num_buckets % 4 == 0, self.weight, "of a multiple of four buckets")
        require(self.max_distance > self.num_buckets // 4, self.weight, "of a larger distance than that of near keys")


@dataclass(frozen=True, slots=True)
class EncoderDescription:
    """An encoder: the sum of up to three embeddings, a norm, and layers. Its last hidden states are the result.

    Positions are learnt, in an embedding, or rotary.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    num_heads: int
    word_embedding: str
    """The checkpoint's tensor [vocab_size, hidden_size]."""
    position_embedding: str | None
    """The checkpoint's tensor [first_position + context_length, hidden_size]; None: positions are rotary."""
    type_embedding: str | None
    """The checkpoint's tensor [num_types, hidden_size]; None: tokens are of one type. The second text of a pair is of
    the second type, where there is one; all other tokens are of the first.
    """
    num_types: int
    embedding_norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    first_position: int = 0
    """The row of `position_embedding` for a prompt's first token."""
    unused_prefixes: tuple[str, ...] = ()
    """Of the checkpoint's tensors that have no part in the hidden states."""
    prefix: str = ""
    """What the names of all tensors may begin with before these: those of a class with a head that is not used."""
    rope: RopeConfig | None = None
    """Rotary positions of all layers."""
    relative_positions: RelativePositions | None = None
    """What attention depends on beside queries and keys, if it does."""
    score_head: ScoreHeadSpec | None = None
    """Of a cross-encoder or classifier; None: the model computes embeddings."""

    def __post_init__(self) -> None:
        """The backend uses these sizes without further checks."""
        hidden = self.hidden_size
        require(bool(self.layers), "layers", "at least one")
        require(hidden % self.num_heads == 0, "num_heads", f"a divisor of {hidden}")
        require((self.position_embedding is None) == (self.rope is not None), "rope", "in place of learnt positions")
        for layer in self.layers:
            for linear, inputs, outputs in (
                (layer.qkv, hidden, (hidden,) * 3),
                (layer.output, hidden, (hidden,)),
                (layer.mlp.gate_up, hidden, layer.mlp.gate_up.outputs),
                (layer.mlp.down, layer.mlp.width, (hidden,)),
            ):
                require(linear.inputs == inputs, linear.role, f"of {inputs} inputs")
                require(linear.outputs == outputs, linear.role, f"of the outputs {outputs}")
        for norm in self.norms:
            require(norm.size == hidden, norm.name, f"of the size {hidden}")

    @property
    def num_positions(self) -> int | None:
        """How many positions are learnt; None: they are rotary."""
        return None if self.position_embedding is None else self.context_length

    @property
    def head_dim(self) -> int:
        """Of queries, keys and values."""
        return self.hidden_size // self.num_heads

    @property
    def norms(self) -> Iterator[LayerNorm]:
        """In the order in which they are computed."""
        yield self.embedding_norm
        for layer in self.layers:
            yield from (layer.attention_norm, layer.mlp_norm)
