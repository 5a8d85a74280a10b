"""Tokenizers and chat templates of the kinds that model families have, in small."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gateway_svc.chat_template import ChatTemplate

_CORPUS = [
    "hello world, the user said: what is <|im_end|> for? assistant and system and tool",
    "start of turn, end of turn, think about it; tool call and tool response",
    "if a < b and c[0] > d: return '<b>hello</b>' | [INST] header_id eot_id",
] * 4
_VOCAB_SIZE = 420

Markers = Sequence[AddedToken]


def special(*literals: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(literal, special=True, normalized=False, **flags) for literal in literals]


def ordinary(*literals: str, normalized: bool = False) -> list[AddedToken]:
    return [AddedToken(literal, special=False, normalized=normalized) for literal in literals]


def byte_level(markers: Markers, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """As of Qwen, Llama 3, DeepSeek and SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=_VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens(list(markers))
    return tokenizer


def sentencepiece(markers: Markers, *, prefix: str) -> Tokenizer:
    """Spaces as ▁, unknown characters as bytes, and control tokens in the vocabulary of the model too. `prefix` is what
    puts a ▁ before a text: "normalizer" (Llama 2), "first" (new Llama and Mistral) or "none" (Gemma).
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=_VOCAB_SIZE, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"], "<s"]
    merges = [*map(tuple, model["merges"]), ("<", "s"), ("<s", ">")]
    vocab = {piece: token_id for token_id, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [] if prefix == "none" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_tokens([*special("<unk>", "<s>", "</s>"), *markers])
    return tokenizer


def unigram(markers: Markers) -> Tokenizer:
    """Control tokens are pieces of the model, which makes them of text at no cost."""
    letters = [(chr(code), -6.0) for code in range(33, 127)]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁hello", -3.0), ("\n", -4.0), *letters]
    tokenizer = Tokenizer(models.Unigram([*pieces], unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens([*special("<unk>", "<s>", "</s>"), *markers])
    return tokenizer


@dataclass(frozen=True, eq=False)
class Family:
    """A family's template and tokenizer."""

    name: str
    source: str
    make_tokenizer: Callable[[], Tokenizer]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    roles: tuple[str, ...] = ("system", "user", "assistant")
    """That its template takes."""

    @property
    def tokenizer(self) -> Tokenizer:
        return _made(self)

    @property
    def template(self) -> ChatTemplate:
        return _compiled(self)

    def literals(self) -> list[str]:
        """Of added tokens that are not white space."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return sorted(token.content for token in added if token.content.strip())


@cache
def _made(family: Family) -> Tokenizer:
    return family.make_tokenizer()


@cache
def _compiled(family: Family) -> ChatTemplate:
    return ChatTemplate(family.source, family.special_tokens)


_CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

_QWEN2 = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ['user', 'assistant'] or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Looks at what messages begin and end with, and takes the reasoning out of earlier answers.
_QWEN3 = """\
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user'
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\n\\n' + system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Its markers of instructions are plain text, and no tokens.
_LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{% for message in turns %}
{% set content = system + message['content'] if loop.first else message['content'] %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}"""

_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role in ['user', 'system'] %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

_GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_PHI3 = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

# Its markers of roles are plain text.
_ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{% endfor %}"""

_DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

# Takes switches out of messages, so that what is left and right of one becomes one text.
_SWITCHES = """\
{%- for message in messages %}
    {%- set content = message.content.replace('/no_think', '').replace('/think', '') %}
    {{- '<SPECIAL_10>' + message.role + '\\n' + content + '<SPECIAL_11>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<SPECIAL_10>assistant\\n<think>\\n' }}{%- endif %}"""

_IM = special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ordinary("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_TOOLS = ("system", "user", "assistant", "tool")
_LLAMA3_MARKERS = special(
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"
)
_PHI3_MARKERS = special("<|assistant|>", "<|end|>", "<|system|>", "<|user|>", rstrip=True)
_DEEPSEEK_MARKERS = [
    *special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    *ordinary("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
]

FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", _CHATML, lambda: byte_level(_IM), {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}),
        Family(
            "qwen2", _QWEN2, lambda: byte_level([*_IM, *_THINK[2:]], normalizers.NFC()),
            {"eos_token": "<|im_end|>"}, _TOOLS,
        ),
        Family("qwen3", _QWEN3, lambda: byte_level([*_IM, *_THINK], normalizers.NFC()), roles=_TOOLS),
        Family(
            "llama3", _LLAMA3, lambda: byte_level(_LLAMA3_MARKERS),
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, _TOOLS,
        ),
        Family("llama2", _LLAMA2, lambda: sentencepiece([], prefix="normalizer"), _LLAMA),
        Family(
            "mistral", _MISTRAL,
            lambda: sentencepiece(
                special("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"), prefix="first"
            ),
            _LLAMA, _TOOLS,
        ),
        Family(
            "gemma", _GEMMA,
            lambda: sentencepiece(
                [*special("<start_of_turn>", "<end_of_turn>"), *ordinary("\n", "\n\n", "▁▁", "<b>", "</b>")],
                prefix="none",
            ),
            _LLAMA, ("user", "assistant"),
        ),
        Family("phi3", _PHI3, lambda: sentencepiece(_PHI3_MARKERS, prefix="normalizer"), _LLAMA),
        Family("phi4-mini", _PHI3, lambda: byte_level(
            [*special("<|endoftext|>"), *ordinary("<|assistant|>", "<|end|>", "<|system|>", "<|user|>")]
        ), {"eos_token": "<|endoftext|>"}),
        Family("zephyr", _ZEPHYR, lambda: sentencepiece([], prefix="first"), _LLAMA),
        Family(
            "deepseek", _DEEPSEEK, lambda: byte_level(_DEEPSEEK_MARKERS, normalizers.Sequence([])),
            {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        ),
        Family(
            "switches", _SWITCHES,
            lambda: byte_level(special("<SPECIAL_10>", "<SPECIAL_11>", "<think>", "</think>")),
        ),
        # As fine-tunes of Llama 2 have: a normalizer applies to some of the markers too.
        Family("normalized markers", _CHATML, lambda: sentencepiece(
            [*special("<|im_end|>"), *ordinary("<|im_start|>", normalized=True)], prefix="normalizer"
        ), _LLAMA),
        Family("lower case", _CHATML, lambda: byte_level(
            [AddedToken(token.content, special=True, normalized=True) for token in _IM],
            normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        )),
        Family("unigram", _ZEPHYR, lambda: unigram([]), _LLAMA),
    )
}  # fmt: skip


def chat(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    """Messages of (role, content)."""
    return [{"role": role, "content": content} for role, content in turns]
