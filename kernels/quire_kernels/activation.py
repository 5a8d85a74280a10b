"""The activation of an MLP: of one product, or of a gate, times up (arXiv:2002.05202), which may be another tensor."""

from enum import Enum

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import ceil_div, check_rows, next_power_of_2


class Activation(Enum):
    """The function; GELU by the error function, GELU_TANH by the approximation in arXiv:1606.08415; RELU2 is the square
    of RELU.

    SWIGLU_OAI is that of a gate and up alone, (up + 1) * gate * sigmoid(1.702 * gate), of a gate of at most 7 and up
    from -7 to 7: gpt-oss's.
    """

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU2 = "relu2"
    SWIGLU_OAI = "swiglu_oai"


@triton.jit
def _sigmoid(b_inputs):  # type: ignore[no-untyped-def]
    """Without an intermediate infinity for any input."""
    b_decay = tl.exp(-tl.abs(b_inputs))
    return tl.where(b_inputs >= 0.0, 1.0, b_decay) / (1.0 + b_decay)


@triton.jit  # type: ignore[untyped-decorator]
def activate(b_inputs, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of each float32 element; ACTIVATION is the value of an `Activation`."""
    if ACTIVATION == "silu":
        b_active = b_inputs * _sigmoid(b_inputs)
    elif ACTIVATION == "gelu_tanh":
        # x/2 * (1 + tanh(y)) = x * sigmoid(2y), y = sqrt(2/pi) * (x + 0.044715 x^3)
        b_active = b_inputs * _sigmoid(1.5957691216057308 * (b_inputs + 0.044715 * b_inputs * b_inputs * b_inputs))
    elif ACTIVATION == "relu":
        # NaN stays NaN
        b_active = tl.where(b_inputs <= 0.0, 0.0, b_inputs)
    elif ACTIVATION == "relu2":
        b_active = tl.where(b_inputs <= 0.0, 0.0, b_inputs * b_inputs)
    else:
        tl.static_assert(ACTIVATION == "gelu")
        b_active = 0.5 * b_inputs * (1.0 + tl.erf(b_inputs * 0.7071067811865476))
    return b_active


@triton.jit  # type: ignore[untyped-decorator]
def gated(b_gate, b_up, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of a float32 gate, times up."""
    if ACTIVATION == "swiglu_oai":
        # NaN stays NaN
        b_gate = tl.where(b_gate > 7.0, 7.0, b_gate)
        b_up = tl.where(b_up > 7.0, 7.0, tl.where(b_up < -7.0, -7.0, b_up))
        b_active = b_gate * _sigmoid(1.702 * b_gate) * (b_up + 1.0)
    else:
        b_active = activate(b_gate, ACTIVATION) * b_up
    return b_active


@triton.jit  # type: ignore[untyped-decorator]
def _activation_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_inputs,
    p_factors,
    stride_output_token,
    stride_inputs_token,
    stride_factors_token,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_column = o_column < WIDTH
    p_row = p_inputs + token * stride_inputs_token + o_column
    # [TILE] each
    b_output = tl.load(p_row, mask=m_column, other=0.0).to(tl.float32)
    if GATED:
        b_output = gated(b_output, tl.load(p_row + WIDTH, mask=m_column, other=0.0).to(tl.float32), ACTIVATION)
    elif p_factors is not None:
        p_factor = p_factors + token * stride_factors_token + o_column
        b_output = gated(b_output, tl.load(p_factor, mask=m_column, other=0.0).to(tl.float32), ACTIVATION)
    else:
        b_output = activate(b_output, ACTIVATION)
    tl.store(p_output + token * stride_output_token + o_column, b_output.to(p_output.dtype.element_ty), mask=m_column)


def plain_activation(inputs: Tensor, activation: Activation) -> Tensor:
    """The activation of each element, computed in float32 and rounded once.

    Args:
        inputs: [num_tokens, width], last dimension contiguous.

    Returns:
        [num_tokens, width], contiguous, of the dtype of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype or stride.
    """
    check_rows(inputs, "inputs")
    check_plain(activation)
    return _launch(inputs, activation, inputs.shape[1], is_gated=False)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """The activation of the gate times up, computed in float32 and rounded once.

    Args:
        gate_up: [num_tokens, 2 * width], gate first, last dimension contiguous.

    Returns:
        [num_tokens, width], contiguous, of the dtype of `gate_up`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype or stride.
    """
    check_gate_up(gate_up)
    return _launch(gate_up, activation, gate_up.shape[1] // 2, is_gated=True)


def activation_product(inputs: Tensor, factors: Tensor, activation: Activation) -> Tensor:
    """The activation of each element, times its factor, computed in float32 and rounded once.

    Args:
        inputs: [num_tokens, width], last dimension contiguous.
        factors: of the same shape, last dimension contiguous.

    Returns:
        [num_tokens, width], contiguous, of the dtype of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype, stride or device.
    """
    check_factors(inputs, factors, activation)
    return _launch(inputs, activation, inputs.shape[1], is_gated=False, factors=factors)


def _launch(
    inputs: Tensor, activation: Activation, width: int, *, is_gated: bool, factors: Tensor | None = None
) -> Tensor:
    num_tokens = len(inputs)
    output = torch.empty((num_tokens, width), dtype=inputs.dtype, device=inputs.device)
    if output.numel() == 0:
        return output
    tile = min(1024, next_power_of_2(width))
    _activation_kernel[(num_tokens, ceil_div(width, tile))](
        output,
        inputs,
        factors,
        output.stride(0),
        inputs.stride(0),
        0 if factors is None else factors.stride(0),
        WIDTH=width,
        GATED=is_gated,
        ACTIVATION=activation.value,
        TILE=tile,
        num_warps=4,
    )
    return output


def plain_activation_reference(inputs: Tensor, activation: Activation) -> Tensor:
    """`plain_activation` in plain torch."""
    check_rows(inputs, "inputs")
    check_plain(activation)
    return _activate_reference(inputs.float(), activation).to(inputs.dtype)


def gated_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """`gated_activation` in plain torch."""
    check_gate_up(gate_up)
    gate, up = gate_up.float().chunk(2, -1)
    if activation is Activation.SWIGLU_OAI:
        gate = gate.clamp(max=7.0)
        return ((up.clamp(-7.0, 7.0) + 1.0) * gate * torch.sigmoid(1.702 * gate)).to(gate_up.dtype)
    return (_activate_reference(gate, activation) * up).to(gate_up.dtype)


def activation_product_reference(inputs: Tensor, factors: Tensor, activation: Activation) -> Tensor:
    """`activation_product` in plain torch."""
    check_factors(inputs, factors, activation)
    return (_activate_reference(inputs.float(), activation) * factors.float()).to(inputs.dtype)


def _activate_reference(inputs: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.SILU:
            return F.silu(inputs)
        case Activation.GELU:
            return F.gelu(inputs)
        case Activation.GELU_TANH:
            return F.gelu(inputs, approximate="tanh")
        case Activation.RELU:
            return F.relu(inputs)
        case Activation.RELU2:
            return F.relu(inputs).square()
        case Activation.SWIGLU_OAI:
            raise AssertionError("of a gate and up alone")


def check_plain(activation: Activation) -> None:
    """The activation must be one of a single product."""
    require(activation is not Activation.SWIGLU_OAI, "activation", "be one of a single product")


def check_factors(inputs: Tensor, factors: Tensor, activation: Activation) -> None:
    """The factors must be those of `inputs`, and the activation one of a single product."""
    check_rows(inputs, "inputs")
    check_plain(activation)
    check_rows(factors, "factors")
    require(factors.shape == inputs.shape, "factors", "have the shape of inputs")
    require(factors.device == inputs.device, "factors", "be on the device of inputs")


def check_gate_up(gate_up: Tensor) -> None:
    """The tensor must be [num_tokens, 2 * width]."""
    check_rows(gate_up, "gate_up")
    require(gate_up.shape[1] % 2 == 0, "gate_up", "have an even width: gate and up side by side")
