"""Fields of the OpenAI and vLLM APIs that are not served, with their neutral values: those are accepted, any other
value is rejected by the field's name. Fields that neither API defines are ignored."""

from collections.abc import Mapping, Sequence
from typing import Any

Neutral = Mapping[str, Sequence[Any]]

_BOTH: Neutral = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "data_parallel_rank": (),
    "guided_decoding_backend": ("auto", "guidance"),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": (),  # named by the Idempotency-Key header
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
}

COMPLETION: Neutral = {
    **_BOTH,
    "add_special_tokens": (True,),
    "echo": (False,),
    "prompt_embeds": (),
    "suffix": ("",),
}

CHAT: Neutral = {
    **_BOTH,
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

MESSAGE: Neutral = {
    "audio": (),
    "refusal": (),
}

STRUCTURED_OUTPUTS: Neutral = {
    "structural_tag": (),
}

STREAM_OPTIONS: Neutral = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}
