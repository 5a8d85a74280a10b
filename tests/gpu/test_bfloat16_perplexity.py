"""Perplexity in bfloat16 is that of transformers' modules in bfloat16, for each architecture that is computed natively,
with compiled Triton kernels.
"""

from pathlib import Path

import pytest
import torch

from bfloat16_perplexity import VARIANTS, check_triton_kernels, save_variant

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", VARIANTS)
def test_perplexity(name: str, tmp_path: Path) -> None:
    check_triton_kernels(name, save_variant(name, tmp_path), "cuda", num_texts=32, length=90)
