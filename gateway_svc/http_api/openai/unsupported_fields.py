"""Fields of other APIs that are not served, with the values that turn them off: those are accepted, any other one is
rejected by the field's name. And fields that have no effect on the answer."""

from gateway_svc.http_api.body_model import Neutral, Notes

_OPENAI_AND_VLLM: Neutral = {
    "audio": (),
    "data_parallel_rank": (),
    "ec_transfer_params": ({},),
    "guided_decoding_backend": ("auto", "guidance"),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "max_dynamic_patch": (),
    "media_io_kwargs": ({},),
    "min_dynamic_patch": (),
    "mm_payload": ("tensors", "none"),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "repetition_detection": (),
    "request_id": (),  # named by the Idempotency-Key header
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "store": (False,),
    "structural_tag": (),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}

_SGLANG: Neutral = {
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "disagg_prefill_dp_rank": (),
    "extra_key": (),
    "images_config": ({},),
    "input_ids": (),
    "lora_path": (),
    "ngram_corpus_id": (),
    "no_stop_trim": (False,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "rid": (),
    "routed_dp_rank": (),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": ("", []),
    "stream_reasoning": (True,),
    "task": (),
    "use_audio_in_video": (False,),
}

_LLAMA_CPP: Neutral = {
    "adaptive_decay": (0.9,),
    "adaptive_target": (-1,),
    "dry_allowed_length": (2,),
    "dry_base": (1.75,),
    "dry_multiplier": (0,),
    "dry_penalty_last_n": (-1,),
    "dry_sequence_breakers": (["\n", ":", '"', "*"],),
    "dynatemp_exponent": (1,),
    "dynatemp_range": (0,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "id_slot": (-1,),
    "image_data": ([],),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5,),
    "n_cmpl": (1,),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "reasoning_in_content": (False,),
    "repeat_last_n": (64,),
    "repeat_penalty": (1,),
    "response_fields": ([],),
    "return_progress": (False,),
    "return_tokens": (False,),
    "samplers": (),
    "t_max_predict_ms": (-1, 0),
    "t_max_prompt_ms": (-1, 0),
    "tfs_z": (1,),
    "thinking_forced_open": (False,),
    "timings_per_token": (False,),
    "top_n_sigma": (-1,),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
}

_TGI: Neutral = {
    "adapter_id": (),
    "decoder_input_details": (False,),
    "details": (False,),
    "do_sample": (),
    "guideline": (),
    "inputs": (),
    "max_new_tokens": (),
    "parameters": ({},),
    "return_full_text": (False,),
    "tool_prompt": (),
    "top_n_tokens": (0,),
    "truncate": (),
    "watermark": (False,),
}

_ANTHROPIC_AND_OLLAMA: Neutral = {
    "container": (),
    "context": ([],),
    "context_management": (),
    "format": ("",),
    "images": ([],),
    "max_tokens_to_sample": (),
    "mcp_servers": ([],),
    "num_ctx": (),
    "num_predict": (-1,),
    "options": ({},),
    "output_config": ({},),
    "output_format": (),
    "raw": (False,),
    "reasoning": ({},),  # of OpenAI's responses, and of gateways to several APIs
    "stop_sequences": ([],),
    "system": ("", []),
    "template": ("",),
    "think": (),
}

# Of transformers, and of services with the model's own API: fields that clients send to any server.
_OTHERS: Neutral = {
    "enable_thinking": (),  # chat_template_kwargs may have it
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "max_length": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "thinking_budget": (),
    "top_a": (0,),
}

_BOTH: Neutral = {**_OTHERS, **_OPENAI_AND_VLLM, **_SGLANG, **_LLAMA_CPP, **_TGI, **_ANTHROPIC_AND_OLLAMA}

COMPLETION: Neutral = {
    **_BOTH,
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "prompt_embeds": (),
    "thinking": ({"type": "disabled"},),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}

EMBEDDINGS: Neutral = {
    "content": (),
    "embd_normalize": (),
    "embed_dtype": ("float32",),
    "embedding_types": (["float"],),
    "endianness": ("native", "little"),  # only base64 has one: it is little-endian everywhere, as in OpenAI's API
    "input_type": (),
    "late_chunking": (False,),
    "output_dimension": (),
    "output_dtype": ("float",),
    "padding": ("do_not_pad",),
    "prompt_name": (),
    "texts": (),
    "truncate": (False,),
    "truncation": (),
    "truncation_direction": ("right", "Right"),
}

# Names that vLLM had for use_activation.
_ACTIVATION: Neutral = {
    "activation": (True,),
    "softmax": (True,),
}

# Those of transformers' pipelines among them, and of services that take the labels from the client.
CLASSIFY: Neutral = {
    **_ACTIVATION,
    "candidate_labels": (),
    "encoding_format": ("float",),
    "function_to_apply": (),
    "inputs": (),
    "labels": (),
    "padding": ("do_not_pad",),
    "return_all_scores": (True,),
    "text_pair": (),
    "top_k": (),
}

COHERE_EMBED: Neutral = {
    "images": ([],),
    "inputs": ([],),
}

_SIMILARITY: Neutral = {
    **_ACTIVATION,
    "add_special_tokens": (True,),
    "return_embeddings": (False,),
}

SCORE: Neutral = {
    **_SIMILARITY,
    "apply_softmax": (False,),
    "item_first": (False,),
    "label_token_ids": (),
    "query": (),
    "return_documents": (False,),
    "return_text": (False,),
    "top_n": (0,),
}

RERANK: Neutral = {
    **_SIMILARITY,
    "max_chunks_per_doc": (),
    "rank_fields": (["text"],),
}

SIMILARITY_WITHOUT_EFFECT: Notes = {
    "normalize": "A cosine does not depend on the length of vectors, and a cross-encoder has none.",
}

CHAT: Neutral = {
    **_BOTH,
    "chat_template": (),
}

MESSAGE: Neutral = {
    "audio": (),
    "refusal": (),
}

STRUCTURED_OUTPUTS: Neutral = {
    "structural_tag": (),
}

STREAM_OPTIONS: Notes = {
    "include_obfuscation": "Padding, which hides the length of texts from others on the network: none is added.",
}

WITHOUT_EFFECT: Notes = {
    "anthropic_version": "The version of another API.",
    "cache_prompt": "The prefix cache is always in use.",
    "custom_labels": "Labels of metrics.",
    "inference_geo": "Where to run the request.",
    "keep_alive": "How long the model stays loaded: it always does.",
    "metadata": "The client's notes.",
    "prompt_cache_key": "The prefix cache finds the longest common prefix itself.",
    "prompt_cache_options": "As prompt_cache_key.",
    "prompt_cache_retention": "As prompt_cache_key.",
    "safety_identifier": "Who asks.",
    "session_id": "Which conversation this is.",
    "stream_interval": "How many tokens an event has: each has what is ready.",
    "user": "Who asks.",
}
