"""The gated activation of an MLP (arXiv:2002.05202), from a product that holds gate and up side by side."""

from enum import Enum

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import check_rows


class Activation(Enum):
    """The activation function of the gate."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


@triton.jit
def _sigmoid(b_inputs):  # type: ignore[no-untyped-def]
    """Without an intermediate infinity for any input."""
    b_decay = tl.exp(-tl.abs(b_inputs))
    return tl.where(b_inputs >= 0.0, 1.0, b_decay) / (1.0 + b_decay)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_activation_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_gate_up,
    stride_output_token,
    stride_gate_up_token,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_column = o_column < WIDTH
    p_gate = p_gate_up + token * stride_gate_up_token + o_column
    # [TILE] each
    b_gate = tl.load(p_gate, mask=m_column, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + WIDTH, mask=m_column, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        b_active = b_gate * _sigmoid(b_gate)
    elif ACTIVATION == "gelu_tanh":
        # x/2 * (1 + tanh(y)) = x * sigmoid(2y), y = sqrt(2/pi) * (x + 0.044715 x^3)
        b_active = b_gate * _sigmoid(1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate))
    else:
        tl.static_assert(ACTIVATION == "gelu")
        b_active = 0.5 * b_gate * (1.0 + tl.erf(b_gate * 0.7071067811865476))
    b_output = (b_active * b_up).to(p_output.dtype.element_ty)
    tl.store(p_output + token * stride_output_token + o_column, b_output, mask=m_column)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """The activation of the gate times up, computed in float32 and rounded once.

    Args:
        gate_up: [num_tokens, 2 * width], gate first, last dimension contiguous.
        activation: of the gate; GELU by the error function, GELU_TANH by Hendrycks and Gimpel's
            approximation (arXiv:1606.08415).

    Returns:
        [num_tokens, width], contiguous, of the dtype of `gate_up`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype or stride.
    """
    _check(gate_up)
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if output.numel() == 0:
        return output
    tile = min(1024, triton.next_power_of_2(width))
    _gated_activation_kernel[(num_tokens, triton.cdiv(width, tile))](
        output,
        gate_up,
        output.stride(0),
        gate_up.stride(0),
        WIDTH=width,
        ACTIVATION=activation.value,
        TILE=tile,
        num_warps=4,
    )
    return output


def gated_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """`gated_activation` in plain torch."""
    _check(gate_up)
    gate, up = gate_up.float().chunk(2, -1)
    match activation:
        case Activation.SILU:
            active = F.silu(gate)
        case Activation.GELU:
            active = F.gelu(gate)
        case Activation.GELU_TANH:
            active = F.gelu(gate, approximate="tanh")
    return (active * up).to(gate_up.dtype)


def _check(gate_up: Tensor) -> None:
    check_rows(gate_up, "gate_up")
    require(gate_up.shape[1] % 2 == 0, "gate_up", "have an even width: gate and up side by side")
