"""The weights of multi-head latent attention, as the compiled forward pass takes them."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int64
from dataclasses import dataclass, field

from quire_kernels.cpu.linear import MatrixArgs, PackedMatrix
from quire_kernels.cpu.norms import NormArgs, PackedNorm


class LatentArgs(Structure):
    """`Latent` of latent.h."""

    _fields_ = (
        ("query_rank", c_int64),
        ("rank", c_int64),
        ("rotated_dim", c_int64),
        ("plain_dim", c_int64),
        ("value_dim", c_int64),
        ("rotates_neighbours", c_int64),
        ("query_norm", NormArgs),
        ("kv_norm", NormArgs),
        ("query_up", MatrixArgs),
        ("key_up", POINTER(MatrixArgs)),
        ("value_up", POINTER(MatrixArgs)),
    )


@dataclass(frozen=True, eq=False)
class PackedLatent:
    """What a layer with latent attention has beside the products of every attention."""

    rank: int
    rotated_dim: int
    plain_dim: int
    value_dim: int
    rotates_neighbours: bool
    """Whether pairs of rotated dimensions are neighbours, or of the two halves."""
    kv_norm: PackedNorm
    key_up: Sequence[PackedMatrix]
    """Of each head, from the part of its query that is not rotated [plain_dim] to [rank]."""
    value_up: Sequence[PackedMatrix]
    """Of each head, from [rank] to its values [value_dim]."""
    query: tuple[int, PackedNorm, PackedMatrix] | None = None
    """The dimensions of the latent vector of queries, its norm, and the product that makes queries of it."""
    _args: LatentArgs = field(init=False, default_factory=LatentArgs)

    def __post_init__(self) -> None:
        args = self._args
        args.rank, args.rotated_dim, args.plain_dim = self.rank, self.rotated_dim, self.plain_dim
        args.value_dim, args.rotates_neighbours = self.value_dim, int(self.rotates_neighbours)
        args.kv_norm = self.kv_norm.args()
        for name, matrices in (("key_up", self.key_up), ("value_up", self.value_up)):
            # The structure keeps the array alive.
            setattr(args, name, (MatrixArgs * len(matrices))(*(matrix.args() for matrix in matrices)))
        if self.query is not None:
            rank, norm, up = self.query
            args.query_rank, args.query_norm, args.query_up = rank, norm.args(), up.args()

    def args(self) -> LatentArgs:
        """The library's structure, valid as long as this object."""
        return self._args
