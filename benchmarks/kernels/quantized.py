"""Cases of products of quantized weights, beside torch's in bfloat16. Rows are in codes already where they need to be:
norms and activations write them.
"""

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.device import Bound


def product(
    device: torch.device, num_rows: int, inputs: int, outputs: int, *, quantization: str, group: int | None = None
) -> KernelCase:
    """A product in a value of QUIRE_QUANTIZATION, w4a16 in groups of `group` inputs; rows are coded before."""
    from quire_kernels.coded_rows import RowCoding, code_rows
    from quire_kernels.cpu.nibbles import DEFAULT_GROUP
    from quire_kernels.scaled_linear import CodedMatrix, scaled_linear
    from quire_kernels.weight_only_linear import weight_only_linear
    from quire_kernels.weight_only_matrix import GroupScales, WeightOnlyMatrix, pack_codes

    group = group or DEFAULT_GROUP
    values = torch.randn(num_rows, inputs, device=device, dtype=torch.bfloat16)
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
    scales = torch.rand(outputs, device=device) / 127

    if quantization in ("w8a8", "fp8"):
        dtype = torch.int8 if quantization == "w8a8" else torch.float8_e4m3fn
        matrix, rows = CodedMatrix(codes.to(dtype), scales[None]), code_rows(values, RowCoding(dtype))
        num_bytes, weight = codes.nbytes, matrix.dense().bfloat16()

        def ours() -> Tensor:
            return scaled_linear(rows, matrix, None, torch.bfloat16)
    else:
        if quantization == "w4a16":
            size = inputs // group, outputs
            of_groups = GroupScales(torch.rand(size, device=device).half(), scales)
            zeros = torch.randint(16, size, device=device).half()
            only = WeightOnlyMatrix.in_groups(pack_codes(codes, 4), 4, inputs, group, of_groups, zeros)
        else:
            only = WeightOnlyMatrix(pack_codes(codes, 8), 8, inputs, scales)
        num_bytes = only.words.nbytes + (0 if only.pairs is None else only.pairs.nbytes)
        weight = only.dense().bfloat16()

        def ours() -> Tensor:
            return weight_only_linear(values, only)

    def plain() -> Tensor:
        return functional.linear(values, weight)

    name, shape = f"product in {quantization}", f"{num_rows} × {inputs} → {outputs}"
    if quantization == "w4a16":
        shape += f", groups of {group}"
    if num_rows < 256:  # reading the weight takes longer than multiplying with it
        return KernelCase(name, shape, Bound.MEMORY, num_bytes, ours, {"torch": plain})
    return KernelCase(name, shape, Bound.MATRIX, 2 * num_rows * inputs * outputs, ours, {"torch": plain})
