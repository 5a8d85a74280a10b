"""StableLM: where attention and MLP are side by side, layers have one norm."""

import re
from collections.abc import Mapping
from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder, has_bias
from worker_svc.gguf.metadata import GgufMetadata


def _more(metadata: GgufMetadata) -> Mapping[str, Any]:
    metadata.get("use_parallel_residual")  # which llama.cpp does not use
    return {"use_parallel_residual": not metadata.has_tensor(re.compile(r"blk\.\d+\.ffn_norm\.weight"))}


ARCHITECTURE = GgufArchitecture(
    decoder(ConfigForm("stablelm", biases={"use_qkv_bias": has_bias("attn_q", "attn_k", "attn_v")}, more=_more))
)
