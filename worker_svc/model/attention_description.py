"""Attention of a description: rotary positions, and the kinds of heads."""

from dataclasses import dataclass
from enum import Enum, StrEnum

from worker_svc.model.linear_description import LinearLayer, Norm, require, require_epsilon


class RopeKind(Enum):
    """How the frequencies of rotary positions are scaled."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    """Only within the original context, so that keys in the cache keep their frequencies."""
    PROPORTIONAL = "proportional"
    """The first `turned_share` of the pairs turn, with the frequencies that they have among all; the others stay."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base, and the scaling of its kind."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    """All kinds but DEFAULT."""
    turned_share: float = 1.0
    """PROPORTIONAL."""
    original_context_length: int = 0
    """LLAMA3 and YARN."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """LLAMA3."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YARN: whether the dimensions at which blending begins and ends are rounded outwards."""
    attention_factor: float = 1.0
    """Factor of rotated queries and keys; other than 1 only for YARN and LONGROPE."""
    rotated_dims: int | None = None
    """How many dimensions of each head are rotated, the first ones; None: all."""
    pair_factors: tuple[float, ...] = ()
    """LONGROPE: what the frequency of each pair of dimensions is divided by."""
    query_beta: float = 0.0
    """Queries are multiplied by 1 + query_beta * log(1 + floor(position / original_context_length)), after their
    rotation: Llama 4's and Ministral 3's attention beyond the original context.
    """


class KVFormat(StrEnum):
    """The format of a layer's keys and values."""

    MODEL = "model"
    """The dtype that the model computes in."""
    FP8 = "fp8"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A token has one normalised *latent* vector, of which keys and values of all heads are products, and one rotated key
    that all heads share. The cache holds these two side by side, as the one KV head of `AttentionSpec`. The products
    for keys are computed with the query, those for values with what attention returns: scores and outputs are the same.
    """

    rank: int
    """Dimensions of the latent vector: the first ones of what the cache holds, and all that values are made of."""
    rotated_dim: int
    """Dimensions of the rotated key, and the last ones of each head's query."""
    plain_dim: int
    """Dimensions of each head's query that are not rotated."""
    value_dim: int
    """Dimensions of each head's values."""
    kv_norm: Norm
    """Of the latent vector."""
    kv_up: LinearLayer
    """From the latent vector: of each head the key [plain_dim], then the value [value_dim]."""
    query_norm: Norm | None = None
    query_up: LinearLayer | None = None
    """From a latent vector of the query, normalised, to the queries of all heads; None: `qkv` returns them."""
    rotates_neighbours: bool = True
    """Pairs of rotated dimensions are (2i, 2i + 1); otherwise (i, i + rotated_dim / 2)."""

    @property
    def query_dim(self) -> int:
        """Dimensions of each head's query before the product for keys."""
        return self.plain_dim + self.rotated_dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention with grouped queries, causal unless `bidirectional`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """What scores are multiplied by, above 0."""
    qkv: LinearLayer
    output: LinearLayer
    rope: RopeConfig | None
    """None: no positions."""
    window: int | None = None
    """How many keys up to its own a query sees; None: all."""
    bidirectional: bool = False
    """Whether a query also sees the keys after its own, of a window as many as before it."""
    soft_cap: float | None = None
    """Scores s become c * tanh(s / c), with c above 0; None: they stay."""
    sinks: str | None = None
    """The checkpoint's tensor [num_heads] of one more score for each head, of a key without a value, which every query
    sees (arXiv:2309.17453); None: there is none.
    """
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    """Of each head, or of all heads together, before rotation."""
    norms_after_rotation: bool = False
    """Whether these norms, which then are of each head, come after rotation."""
    value_norm_eps: float | None = None
    """The epsilon of an RMS norm without a weight of each head's values; None: they have no norm."""
    values_are_keys: bool = False
    """Whether values are what keys are before their norm and rotation: `qkv` returns queries and keys."""
    shared_layer: int | None = None
    """The layer before this one whose keys and values it reads: `qkv` returns queries alone. None: it has its own."""
    kv_format: KVFormat | None = None
    """None: what the worker's settings choose."""
    latent: LatentSpec | None = None
    """Where keys and values are products of a latent vector: `qkv` returns queries, or the latent vector of queries,
    then the latent vector and the key that is rotated; `output` takes the values of all heads.
    """

    def __post_init__(self) -> None:
        require(min(self.num_heads, self.num_kv_heads, self.head_dim) > 0, "num_heads", "above 0, as all sizes")
        require(self.num_heads % self.num_kv_heads == 0, "num_heads", f"a multiple of {self.num_kv_heads} KV heads")
        require(self.scale > 0, "scale", "above 0")
        require(self.window is None or self.window > 0, "window", "above 0")
        require(self.soft_cap is None or self.soft_cap > 0, "soft_cap", "above 0")
        if self.latent is not None:
            self._check_latent(self.latent)
            return
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = queries, *(keys,) * self.num_kv_parts
        require(self.qkv.outputs == parts, "qkv", f"of the outputs {parts}")
        self._check_values()
        require(self.output.inputs == queries, "output", f"of {queries} inputs")
        if (neighbours := self.qkv.rotated_neighbours) is not None:
            has_norms = self.query_norm is not None or self.key_norm is not None
            require(not has_norms, "query_norm", "absent, as key_norm, where neighbours are rotated")
            rotated = neighbours if self.rope is None else self.rope.rotated_dims or self.head_dim
            require(neighbours == rotated, "rotated_neighbours", f"{rotated}, the dimensions that are rotated")
        require(not (self.norms_after_rotation and self.has_joint_norms), "query_norm", "of each head after rotation")
        for name, norm, whole in (("query_norm", self.query_norm, queries), ("key_norm", self.key_norm, keys)):
            size = whole if self.has_joint_norms else self.head_dim
            require(norm is None or norm.size == size, name, f"of the size {self.head_dim}, or {whole} for all heads")

    @property
    def num_kv_parts(self) -> int:
        """What `qkv` returns behind queries: keys and values, keys alone, or nothing."""
        return 0 if self.shared_layer is not None else 1 if self.values_are_keys else 2

    def _check_values(self) -> None:
        if self.shared_layer is not None:
            own = self.key_norm is not None or self.value_norm_eps is not None or self.values_are_keys
            require(not own, "key_norm", "absent, as what is said of values, where another layer has them")
        if self.values_are_keys:
            has_norms = self.key_norm is not None and self.value_norm_eps is not None
            require(
                has_norms and not self.has_joint_norms,
                "key_norm",
                "of each head, as value_norm_eps, where values are keys",
            )
        if self.value_norm_eps is not None:
            require_epsilon("value_norm_eps", self.value_norm_eps)

    @property
    def has_joint_norms(self) -> bool:
        """Whether the norms are of all heads together."""
        norms = self.query_norm, self.key_norm
        return any(norm is not None and norm.size != self.head_dim for norm in norms)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those of queries, keys and latent vectors."""
        norms = (self.query_norm, self.key_norm)
        if self.latent is not None:
            norms = (self.latent.query_norm, self.latent.kv_norm)
        return tuple(norm for norm in norms if norm is not None)

    def _check_latent(self, latent: LatentSpec) -> None:
        stored, queries = latent.rank + latent.rotated_dim, self.num_heads * latent.query_dim
        sizes = latent.rank, latent.rotated_dim, latent.value_dim
        require(min(sizes) > 0, "latent", f"of a rank, rotated dimensions and values above 0, not {sizes}")
        require(self.num_kv_heads == 1, "num_kv_heads", "1 where a latent vector is stored")
        require(self.head_dim == stored, "head_dim", f"{stored}, the dimensions of what is stored")
        require(self.query_norm is None and self.key_norm is None, "query_norm", "absent, as key_norm: see latent")
        require(self.window is None and self.soft_cap is None, "window", "absent, as soft_cap, with a latent vector")
        require(self.sinks is None, "sinks", "absent with a latent vector")
        rotated = None if self.rope is None else self.rope.rotated_dims
        require(rotated == latent.rotated_dim, "rope", f"of {latent.rotated_dim} rotated dimensions")
        width = self.num_heads * (latent.plain_dim + latent.value_dim)
        require(latent.kv_norm.size == latent.rank, "kv_norm", f"of the size {latent.rank}")
        require(latent.kv_up.inputs == latent.rank, "kv_up", f"of {latent.rank} inputs")
        require(latent.kv_up.outputs == (width,), "kv_up", f"of {width} outputs")
        require(not latent.kv_up.biased, "kv_up", "without a bias")
        require((latent.query_norm is None) == (latent.query_up is None), "query_norm", "present with query_up alone")
        if latent.query_norm is not None and latent.query_up is not None:
            require(latent.query_up.inputs == latent.query_norm.size, "query_up", f"of {latent.query_norm.size} inputs")
            require(latent.query_up.outputs == (queries,), "query_up", f"of {queries} outputs")
            queries = latent.query_norm.size
        require(self.qkv.outputs == (queries, stored), "qkv", f"of the outputs {(queries, stored)}")
        require(self.output.inputs == self.num_heads * latent.value_dim, "output", "of the values of all heads")
