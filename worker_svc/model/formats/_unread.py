"""Tensors of quantized checkpoints that are not read: activations are not quantized, and KV has scales of its own."""

_OF_ACTIVATIONS = (
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".prob_output_scale",
    ".output_zero_point",
)
_OF_KV = (
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".q_zero_point",
    ".k_zero_point",
    ".v_zero_point",
)

UNREAD = _OF_ACTIVATIONS + _OF_KV
"""The last parts of their names."""
