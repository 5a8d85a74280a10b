"""The bias, the factor and the soft cap of logits against torch's own operators."""

from typing import Any

import pytest
import torch

from quire_kernels.logits_epilogue import logits_epilogue, logits_epilogue_reference


@pytest.mark.parametrize(("scale", "soft_cap"), [(None, None), (None, 3.0), (None, 30.0), (0.125, None), (0.3, 3.0)])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 111, 4096, 9001])
def test_logits(
    scale: float | None, soft_cap: float | None, bias_dtype: torch.dtype | None, vocab_size: int, device: str
) -> None:
    torch.manual_seed(0)
    whole = (torch.randn(3, vocab_size + 5) * 20).to(device)
    bias = None if bias_dtype is None else torch.randn(vocab_size).to(device, bias_dtype)
    actual, expected = whole.clone(), whole.clone()
    logits_epilogue(actual[:, :vocab_size], bias, soft_cap, scale=scale)
    logits_epilogue_reference(expected[:, :vocab_size], bias, soft_cap, scale=scale)
    # With a cap of c, absolute errors are about c times float32's precision.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(actual[:, vocab_size:], whole[:, vocab_size:])
    assert torch.equal(actual, whole) == (bias is None and scale is None and soft_cap is None)


def test_far_logits_come_to_the_cap_and_nan_stays(device: str) -> None:
    logits = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30, float("nan")]], device=device)
    logits_epilogue(logits, None, 2.0)
    assert logits[0, :5].tolist() == [-2.0, -2.0, 0.0, 2.0, 2.0]
    assert bool(logits[0, 5].isnan())


def test_no_rows(device: str) -> None:
    logits_epilogue(torch.zeros(0, 8, device=device), None, 2.0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("logits", torch.zeros(8)),
        ("logits", torch.zeros(2, 8).half()),
        ("bias", torch.zeros(7)),
        ("bias", torch.zeros(8, dtype=torch.int64)),
        ("soft_cap", 0.0),
        ("soft_cap", -1.0),
    ],
)
def test_a_wrong_argument_is_named(argument: str, value: Any) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 8), "bias": torch.zeros(8), "soft_cap": 1.0}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        logits_epilogue(**arguments | {argument: value})
