"""Norms are packed with what belongs together."""

import pytest
import torch

from quire_kernels.cpu.norms import NormCode, pack_norm


def test_a_bias_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^bias: "):
        pack_norm(NormCode.LAYER, torch.ones(48), torch.ones(3), 1e-5)
