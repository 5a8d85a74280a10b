"""DeepSeek-V2 and V3, and what is computed as they are: R1, Kimi K2, GLM-4.7-Flash, Youtu-LLM."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from worker_svc.gguf.architecture import GgufArchitecture, JoinedTensors
from worker_svc.gguf.config import SIGMOID, SOFTMAX, ConfigForm, read_decoder
from worker_svc.gguf.metadata import GgufMetadata

# Of GLM-4.7-Flash, of which the first files do not say how experts are scored.
_GLM_VOCAB, _GLM_BLOCKS = 154_880, (47, 48)
# What converters multiply YaRN's weight by.
_WEIGHT_FACTOR = 0.1


def _read_config(metadata: GgufMetadata) -> Any:
    rotated: int = metadata.needed("rope.dimension_count")
    # The first files have the dimensions of decompressed heads there.
    query_dim = metadata.get("attention.key_length_mla") or metadata.needed("attention.key_length")
    value_dim = metadata.get("attention.value_length_mla") or metadata.needed("attention.value_length")
    for name in ("attention.key_length", "attention.value_length", "attention.head_count_kv"):
        metadata.get(name)
    fields: dict[str, Any] = {
        "num_key_value_heads": metadata.needed("attention.head_count"),
        "kv_lora_rank": metadata.needed("attention.kv_lora_rank"),
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": query_dim - rotated,
        "v_head_dim": value_dim,
        "head_dim": rotated,
    }
    config = read_decoder(metadata, _form(metadata, fields))
    rope = config.rope_parameters
    weight = metadata.get("rope.scaling.yarn_log_multiplier")
    if weight and rope["rope_type"] == "yarn":
        # llama.cpp takes both weights to be equal. Scores are multiplied by the square of the temperature.
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), float(weight) / _WEIGHT_FACTOR)
        del rope["attention_factor"]
    return config


def _form(metadata: GgufMetadata, fields: dict[str, Any]) -> ConfigForm:
    if not metadata.get("expert_count"):
        return ConfigForm(
            "youtu",
            more=lambda _: fields,
            unused=(
                "expert_feed_forward_length",
                "leading_dense_block_count",
                "expert_weights_scale",
                "expert_weights_norm",
                "expert_gating_func",
            ),
        )
    common = {"routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "norm_topk_prob": False}
    scores = metadata.get("expert_gating_func")
    is_glm = metadata.num_rows("token_embd.weight") == _GLM_VOCAB and metadata.num_blocks in _GLM_BLOCKS
    if scores in SIGMOID or (not scores and is_glm):
        return ConfigForm(
            "deepseek_v3",
            fixed=common | {"rope_interleave": True, "n_group": 1, "topk_group": 1},
            more=lambda _: fields,
        )
    if scores not in (None, 0, *SOFTMAX):
        raise metadata.not_read("expert_gating_func")
    has_groups = (metadata.peek("expert_group_count") or 1) > 1
    method = "group_limited_greedy" if has_groups else "greedy"
    return ConfigForm("deepseek_v2", fixed=common, more=lambda _: fields | {"topk_method": method})


def _keys_and_values(parts: Sequence[Tensor]) -> Tensor:
    """The product for keys and values, of that for keys, [heads, rank, keys], and that for values, [heads, values,
    rank].
    """
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


ARCHITECTURE = GgufArchitecture(
    _read_config,
    joined={
        "self_attn.kv_b_proj.weight": JoinedTensors(
            ("attn_k_b.weight", "attn_v_b.weight"), _keys_and_values, keeps_rows=False
        )
    },
)
