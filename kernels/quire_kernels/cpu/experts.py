"""A mixture of experts by compiled code: each token is multiplied by the matrices of its own experts."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire_kernels._checks import require
from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.linear import PANEL, MatrixArgs, PackedMatrix
from quire_kernels.cpu.thread_pool import ThreadPool, type_of

# `MAX_GROUPS` of experts.h.
_MAX_GROUPS = 256


class ExpertScoring(IntEnum):
    """`ExpertScoring` of experts.h: what makes weights of the router's scores."""

    SOFTMAX = 0
    SIGMOID = 1


class ExpertsArgs(Structure):
    """`Experts` of experts.h."""

    _fields_ = (
        ("num_experts", c_int64),
        ("num_chosen", c_int64),
        ("is_normalized", c_int64),
        ("scale", c_float),
        ("activation", c_int64),
        ("router", MatrixArgs),
        ("gate_up", POINTER(MatrixArgs)),
        ("down", POINTER(MatrixArgs)),
        ("shared_gate_up", MatrixArgs),
        ("shared_down", MatrixArgs),
        ("scoring", c_int64),
        ("choice_bias", c_void_p),
        ("num_groups", c_int64),
        ("num_chosen_groups", c_int64),
        ("num_summed", c_int64),
        ("weight_scales", c_void_p),
    )


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The weights of a layer's experts, all packed alike, and of an MLP for all tokens.

    Outputs of each `gate_up` are sixteen of the gate, the same of up, and so on, both padded to a multiple of 32.
    """

    router: PackedMatrix
    """An output for each expert; one more, if there is one, is the gate of the shared MLP."""
    gate_up: Sequence[PackedMatrix]
    down: Sequence[PackedMatrix]
    num_chosen: int
    is_normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float
    activation: ActivationCode
    shared: tuple[PackedMatrix, PackedMatrix] | None = None
    """Gate and up, and down."""
    scoring: ExpertScoring = ExpertScoring.SOFTMAX
    choice_bias: Tensor | None = None
    """float32 [num_experts], which is added to the weights for the choice alone."""
    groups: tuple[int, int, int] | None = None
    """How many groups of neighbouring experts there are, of how many of them a token's experts are, and how many of a
    group's best weights are summed to choose it.
    """
    weight_scales: Tensor | None = None
    """float32 [num_experts], factors of the weights in the end."""
    _args: ExpertsArgs = field(init=False, default_factory=ExpertsArgs)

    def __post_init__(self) -> None:
        args = self._args
        count = len(self.gate_up)
        require(count > 0 and len(self.down) == count, "down", "be as many as gate_up, one at least")
        require(self.router.outputs in (count, count + 1), "router", f"have an output for each of {count} experts")
        require(1 <= self.num_chosen <= count, "num_chosen", f"be 1 to {count}")
        args.num_experts, args.num_chosen = count, self.num_chosen
        args.is_normalized, args.scale, args.activation = int(self.is_normalized), self.scale, self.activation
        args.router = self.router.args()
        every = [self.router, *self.gate_up, *self.down, *(self.shared or ())]
        require(all(matrix.order is None for matrix in every), "matrices", "have their inputs in order")
        for name, matrices in (("gate_up", self.gate_up), ("down", self.down)):
            # The structure keeps the array alive.
            setattr(args, name, (MatrixArgs * len(matrices))(*(matrix.args() for matrix in matrices)))
        args.scoring = self.scoring
        for name in ("choice_bias", "weight_scales"):
            if (numbers := getattr(self, name)) is not None:
                is_plain = numbers.dtype == torch.float32 and numbers.is_contiguous()
                require(is_plain and numbers.shape == (count,), name, "be float32 [num_experts]")
                setattr(args, name, numbers.data_ptr())
        if self.groups is not None:
            num_groups, num_chosen_groups, num_summed = self.groups
            fits = 1 <= num_groups <= _MAX_GROUPS and num_summed <= _MAX_GROUPS
            require(fits, "groups", f"be at most {_MAX_GROUPS}, of as many summed weights")
            size, rest = divmod(count, num_groups)
            is_possible = not rest and 1 <= num_chosen_groups <= num_groups and 1 <= num_summed <= size
            require(is_possible and self.num_chosen <= size * num_chosen_groups, "groups", f"fit {count} experts")
            args.num_groups, args.num_chosen_groups, args.num_summed = self.groups
        if self.shared is not None:
            args.shared_gate_up, args.shared_down = (matrix.args() for matrix in self.shared)

    def args(self) -> ExpertsArgs:
        """The library's structure, valid as long as this object."""
        return self._args


def compute_experts(
    thread_pool: ThreadPool, inputs: Tensor, arguments: ExpertsArgs, *, use_amx: bool = False
) -> Tensor:
    """The float32 output [rows, hidden] of experts for `inputs` [rows, hidden], float32 or bfloat16.

    With `use_amx`, which is for bfloat16, matrices are packed by `pack_for_amx`, else by `pack_matrix`. Weights of
    experts that no row chooses are not read.
    """
    require(inputs.ndim == 2, "inputs", "be [rows, hidden]")
    hidden = inputs.shape[1]
    # A matrix may have more inputs, whose weights are zeros.
    fits = -(-hidden // PANEL) == -(-arguments.router.inputs // PANEL)
    require(fits, "inputs", f"be [rows, {arguments.router.inputs}]")
    require(not use_amx or inputs.dtype == torch.bfloat16, "use_amx", "be false for another dtype than bfloat16")
    padded = pad(inputs, (0, -hidden % PANEL)).contiguous()
    output = torch.zeros(len(inputs), padded.shape[1])
    thread_pool.library.quire_experts(
        thread_pool.handle,
        type_of(inputs.dtype),
        int(use_amx),
        byref(arguments),
        padded.data_ptr(),
        len(inputs),
        output.data_ptr(),
    )
    return output[:, :hidden]
