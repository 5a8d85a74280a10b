"""Operations of sixteen lanes have the same results by the instructions of each kind of processor."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from processor_kinds import KINDS, address, compile_for

LANES, PANEL = 16, 32
SPECIAL = torch.tensor(
    [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-126] * 2
)
SUBNORMAL = torch.tensor([1e-40, -1e-40, 1.17e-38, -1.17e-38] * 4)


@pytest.fixture(scope="module", params=KINDS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for(request.param, Path(__file__).with_name("lanes.cpp"), tmp_path_factory.mktemp("lanes"))


def converted(library: ctypes.CDLL, name: str, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    output = torch.empty(len(numbers), dtype=dtype)
    getattr(library, name)(address(numbers), ctypes.c_int64(len(numbers)), address(output))
    return output


def test_bfloat16(library: ctypes.CDLL) -> None:
    """Rounded to the nearest, ties to even."""
    torch.manual_seed(0)
    numbers = torch.cat([torch.randn(1600) * 10 ** torch.randn(1600), SPECIAL])
    expected = numbers.bfloat16()
    found = converted(library, "to_bfloat16", numbers, torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    back = converted(library, "from_bfloat16", expected, torch.float32)
    torch.testing.assert_close(back, expected.float(), rtol=0, atol=0, equal_nan=True)
    exact = expected[:1600]
    assert torch.equal(converted(library, "exactly_to_bfloat16", exact.float(), torch.bfloat16), exact)


def test_subnormal_bfloat16(library: ctypes.CDLL) -> None:
    """Rounded, or zero with the sign: the instruction of AVX-512 computes no subnormal numbers."""
    found = converted(library, "to_bfloat16", SUBNORMAL, torch.bfloat16)
    rounded = SUBNORMAL.bfloat16()
    assert all((found == rounded) | (found == 0))
    assert torch.equal(found.signbit(), SUBNORMAL.signbit())


def test_pairs(library: ctypes.CDLL) -> None:
    low, high = torch.randn(160), torch.randn(160)
    output = torch.empty(320, dtype=torch.bfloat16)
    library.pairs(address(low), address(high), ctypes.c_int64(160), address(output))
    assert torch.equal(output.view(-1, 2), torch.stack([low, high], 1).bfloat16())


def test_float16(library: ctypes.CDLL) -> None:
    """All numbers but those that are not finite: with subnormal ones and both zeros."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()]
    found = converted(library, "from_float16", finite, torch.float32)
    assert torch.equal(found.view(torch.int32), finite.float().view(torch.int32))


def test_bytes(library: ctypes.CDLL) -> None:
    every = torch.arange(-128, 128)
    assert converted(library, "from_bytes", every.to(torch.int8), torch.float32).tolist() == every.tolist()
    assert converted(library, "to_bytes", every.int(), torch.int8).tolist() == every.tolist()


def test_lines_of_bytes(library: ctypes.CDLL) -> None:
    """All codes of keys and values: -127 to 127."""
    codes = torch.arange(-127, 129).clamp(max=127).to(torch.int8)
    floats, halves = torch.empty(len(codes)), torch.empty(len(codes), dtype=torch.bfloat16)
    library.lines_of_bytes(address(codes), ctypes.c_int64(len(codes)), address(floats), address(halves))
    assert torch.equal(floats, codes.float())
    assert torch.equal(halves, codes.bfloat16())


@pytest.mark.parametrize("vocab", [1, 16, 31, 32, 33, 101])
@pytest.mark.parametrize("rows", [1, 16, 35])
def test_the_argmax_of_panels(library: ctypes.CDLL, rows: int, vocab: int) -> None:
    """The first of equal logits; none where one is not finite. What is beyond the vocabulary does not count."""
    torch.manual_seed(vocab)
    # Few values, so that several logits are the largest.
    logits = torch.randint(-9, -4, (rows, vocab)).float()
    for row, value in zip(range(0, rows, 3), (float("nan"), float("inf"), float("-inf")) * rows, strict=False):
        logits[row, torch.randint(vocab, ())] = value
    padded = torch.nn.functional.pad(logits, (0, -vocab % PANEL), value=float("nan"))
    tokens = torch.empty(rows, dtype=torch.int64)
    sizes = (ctypes.c_int64(size) for size in (rows, vocab, padded.shape[1]))
    library.argmax_of_panels(address(padded), *sizes, address(tokens))
    assert torch.equal(tokens, torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1))


def test_transposed_words(library: ctypes.CDLL) -> None:
    words = torch.arange(LANES * LANES, dtype=torch.int32)
    expected = words.view(LANES, LANES).t().flatten().tolist()
    library.transpose_words(address(words))
    assert words.tolist() == expected


@pytest.mark.parametrize("place", range(LANES))
def test_what_sixteen_lanes_come_to(library: ctypes.CDLL, place: int) -> None:
    torch.manual_seed(place)
    numbers, found = torch.rand(LANES), torch.empty(4)
    numbers[place] = 2.0
    sums = numbers
    while len(sums) > 1:  # each lane and the one half a vector away
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    for bound, above, equal in ((1.5, 1.0, 0.0), (2.0, 0.0, 1.0), (2.5, 0.0, 0.0)):
        library.summarize(address(numbers), ctypes.c_float(bound), address(found))
        assert found.tolist() == [2.0, sums.item(), above, equal]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [1, 15, 576])
def test_rows_of_a_product_have_the_same_bits_alone(library: ctypes.CDLL, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    most = library.most_rows()
    rows, weights = torch.randn(most, inputs).to(dtype), torch.randn(inputs, PANEL).to(dtype)
    is_float = dtype == torch.float32
    values = 1 if is_float else 2  # of an output that are neighbours
    panel = torch.nn.functional.pad(weights, (0, 0, 0, -inputs % values)).view(-1, values, PANEL).mT.contiguous()
    padded = torch.nn.functional.pad(rows, (0, -inputs % PANEL))
    products = library.products if is_float else library.products_of_bfloat16

    def sums_of(part: Tensor) -> Tensor:
        sums = torch.empty(len(part), PANEL)
        sizes = ctypes.c_int64(len(part)), ctypes.c_int64(inputs), ctypes.c_int64(part.shape[1])
        products(address(part), *sizes, address(panel), address(sums))
        return sums

    alone = torch.cat([sums_of(row[None]) for row in padded])
    torch.testing.assert_close(alone, rows.float() @ weights.float(), rtol=1e-4, atol=1e-4)
    for count in range(2, most + 1):
        assert torch.equal(sums_of(padded[:count]), alone[:count])
