"""Answers with reasoning, text and calls, as models of a family write them, and the family's model in small."""

import json
from dataclasses import dataclass
from pathlib import Path

from gateway_svc.message_formats.description import MessageFormat
from gateway_svc.message_formats.formats import AUTO, choose_format
from tool_families import CALLING_FAMILIES, TOOL_FAMILIES

ARGUMENTS = '{"city": "São {Paulo}", "days": [1, {"a": "\\"}"}]}'


@dataclass(frozen=True)
class Answer:
    """What a model of a family wrote, and what it means. A call has its arguments, or the text that a tool takes."""

    family: str
    written: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return CALLING_FAMILIES[self.family].tokenizer.encode(self.written, add_special_tokens=False).ids


def format_of(family: str) -> MessageFormat:
    """As a gateway chooses it for the family's model."""
    template = CALLING_FAMILIES[family].template
    return choose_format(AUTO, AUTO, template.constants, template_takes_tools=family in TOOL_FAMILIES)


_HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
_CODER_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
_DEEPSEEK_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + ARGUMENTS + "\n```<｜tool▁call▁end｜>"
)
_CALL = ("get_weather", ARGUMENTS)
_NAMED_ARGUMENTS = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
_BRACE_CALL = '<|tool_call>call:get_weather{city:<|"|>São {Paulo}<|"|>,days:[1,{a:<|"|>"}<|"|>}]}<tool_call|>'
_PYTHON_CALL = """get_weather(city='São {Paulo}', days=[1, {"a": "\\"}"}])"""
_HARMONY_CALL = (
    f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)
CUSTOM_TOOL = "run"
"""The name of a tool that takes a text."""
_PROGRAM = 'print("é\\😀")\n'
_CUSTOM_CALL = json.dumps({"name": CUSTOM_TOOL, "arguments": {"input": _PROGRAM}})

ANSWERS = {
    "reasoning, text and call": Answer(
        "hermes", f"<think>\nHm, 你好.\n</think>\n\nI look. {_HERMES_CALL}", "I look.", "Hm, 你好.", (_CALL,)
    ),
    "two calls": Answer("hermes", f"{_HERMES_CALL}\n{_HERMES_CALL}", calls=(_CALL, _CALL)),
    "text for a tool": Answer(
        "hermes",
        f"I do.\n<tool_call>\n{_CUSTOM_CALL}\n</tool_call>\n{_HERMES_CALL}",
        "I do.",
        calls=((CUSTOM_TOOL, _PROGRAM), _CALL),
    ),
    "text for a tool, in tags": Answer(
        "qwen3-coder",
        f"<tool_call>\n<function=run>\n<parameter=input>\n{_PROGRAM}\n</parameter>\n</function>\n</tool_call>",
        calls=((CUSTOM_TOOL, _PROGRAM),),
    ),
    "text": Answer("hermes", "It is 20 < 30 degrees.", "It is 20 < 30 degrees."),
    "tags": Answer("qwen3-coder", _CODER_CALL, calls=(("get_weather", '{"city": "São Paulo", "days": 2}'),)),
    "hidden markers": Answer(
        "mistral v3",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        calls=(_CALL,),
    ),
    "deepseek": Answer(
        "deepseek v3", f"Yes.<｜tool▁calls▁begin｜>{_DEEPSEEK_CALL}<｜tool▁calls▁end｜>", "Yes.", calls=(_CALL,)
    ),
    "no marker": Answer("llama3.1", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', calls=(_CALL,)),
    "mistral, with hidden markers of reasoning": Answer(
        "mistral small 3.2",
        f"[THINK]Hm, [1].[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"
        f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{ARGUMENTS}",
        "I look.",
        "Hm, [1].",
        (_CALL, _CALL),
    ),
    "deepseek v3.1": Answer(
        "deepseek v3.1",
        "<think>Hm, 你好.</think>I look.<｜tool▁calls▁begin｜>"
        + 2 * f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        + "<｜tool▁calls▁end｜>",
        "I look.",
        "Hm, 你好.",
        (_CALL, _CALL),
    ),
    "granite": Answer(
        "granite 3.3",
        f"<think>Hm.</think>\n<response>I look. <|tool_call|>[{_NAMED_ARGUMENTS}, {_NAMED_ARGUMENTS}]</response>",
        "I look.",
        "Hm.",
        (_CALL, _CALL),
    ),
    "granite, text between markers": Answer(
        "granite 3.3", "<think>Hm.</think><response>Yes, <response> é.\n</response>", "Yes, <response> é.", "Hm."
    ),
    "python": Answer("llama3.2", f"[{_PYTHON_CALL}, {_PYTHON_CALL}]", calls=(_CALL, _CALL)),
    "glm": Answer(
        "glm 4.6",
        "<think>Hm, 你好.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>São {Paulo}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "I look.",
        "Hm, 你好.",
        (("get_weather", '{"city": "São {Paulo}", "days": 2}'),),
    ),
    "kimi": Answer(
        "kimi k2",
        "<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        "Hm.",
        (_CALL, _CALL),
    ),
    "minimax": Answer(
        "minimax m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">São {Paulo}</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_weather">\n</invoke>\n'
        "</minimax:tool_call>",
        calls=(("get_weather", '{"city": "São {Paulo}", "days": 2}'), ("get_weather", "{}")),
    ),
    "seed-oss": Answer(
        "seed-oss",
        "<seed:think>Hm.</seed:think>I look.\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>São {Paulo}</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        "I look.",
        "Hm.",
        (("get_weather", '{"city": "São {Paulo}", "days": 2}'),),
    ),
    "cohere": Answer(
        "command r7b",
        "<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGUMENTS}}}\n]<|END_ACTION|>',
        "",
        "I look.",
        (_CALL,),
    ),
    "cohere, an answer": Answer(
        "command r7b",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes: <co>é</co: 0:[1]>.<|END_RESPONSE|>",
        "Yes: <co>é</co: 0:[1]>.",
        "Hm.",
    ),
    "apertus": Answer(
        "apertus",
        f'<|inner_prefix|>Hm.<|inner_suffix|>I look.<|tools_prefix|>[{{"get_weather": {ARGUMENTS}}}]<|tools_suffix|>',
        "I look.",
        "Hm.",
        (_CALL,),
    ),
    "hunyuan": Answer(
        "hunyuan",
        f"<think>\nHm.\n</think>\n<answer>I look.<tool_calls>[{_NAMED_ARGUMENTS}]</tool_calls></answer>",
        "I look.",
        "Hm.",
        (_CALL,),
    ),
    "longcat": Answer(
        "longcat",
        f"<longcat_think>Hm.</longcat_think>I look.<longcat_tool_call>\n{_NAMED_ARGUMENTS}\n</longcat_tool_call>",
        "I look.",
        "Hm.",
        (_CALL,),
    ),
    "nemotron": Answer(
        "nemotron nano 2",
        f"<think>Hm.</think>\n\nI look.\n<TOOLCALL>[{_NAMED_ARGUMENTS}, {_NAMED_ARGUMENTS}]</TOOLCALL>",
        "I look.",
        "Hm.",
        (_CALL, _CALL),
    ),
    "phi-4-mini": Answer("phi-4-mini", f"<|tool_call|>[{_NAMED_ARGUMENTS}]<|/tool_call|>", calls=(_CALL,)),
    "phi-4-mini, vllm": Answer(
        "phi-4-mini, vllm", f"Yes. functools[{_NAMED_ARGUMENTS}, {_NAMED_ARGUMENTS}]", "Yes.", calls=(_CALL, _CALL)
    ),
    "olmo": Answer(
        "olmo 3",
        f"<think>Hm.</think>I look.\n<function_calls>\n{_PYTHON_CALL}\n{_PYTHON_CALL}\n</function_calls>",
        "I look.",
        "Hm.",
        (_CALL, _CALL),
    ),
    "lfm2": Answer("lfm2.5", f"I look.<|tool_call_start|>[{_PYTHON_CALL}]<|tool_call_end|>", "I look.", calls=(_CALL,)),
    "gemma 4": Answer(
        "gemma 4",
        f"<|channel>thought\nHm, 你好.\n<channel|>I look.{_BRACE_CALL}{_BRACE_CALL}",
        "I look.",
        "Hm, 你好.",
        (_CALL, _CALL),
    ),
    "functiongemma": Answer(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>São {Paulo}<escape>,days:2}<end_function_call>",
        calls=(("get_weather", '{"city": "São {Paulo}", "days": 2}'),),
    ),
    "xlam": Answer("xlam", f"[{_NAMED_ARGUMENTS}, {_NAMED_ARGUMENTS}]", calls=(_CALL, _CALL)),
    "harmony": Answer(
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm, 你好.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        f"<|end|>{_HARMONY_CALL}{_HARMONY_CALL}",
        "I look.",
        "Hm, 你好.",
        (_CALL, _CALL),
    ),
    "harmony, an answer": Answer(
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes, <|x|> é.\n",
        "Yes, <|x|> é.\n",
        "Hm.",
    ),
    "smollm2": Answer(
        "smollm2", f"<tool_call>[{_NAMED_ARGUMENTS}, {_NAMED_ARGUMENTS}]</tool_call>", calls=(_CALL, _CALL)
    ),
    "json": Answer("chatml", f"{_NAMED_ARGUMENTS}\n{_NAMED_ARGUMENTS}", calls=(_CALL, _CALL)),
}


def make_family_directory(path: Path, name: str) -> Path:
    """Writes the files of a family's model that a gateway reads. Its first token ends an answer."""
    family = CALLING_FAMILIES[name]
    path.mkdir(parents=True, exist_ok=True)
    family.tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": family.source, **family.special_tokens}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (path / "model.safetensors").touch()
    return path
