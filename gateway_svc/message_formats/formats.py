"""The formats that are known, by name, and which of them a chat template is of."""

from gateway_svc.message_formats.description import (
    BraceCalls,
    Channels,
    JsonCalls,
    Listing,
    MessageFormat,
    NamedCalls,
    PythonCalls,
    ReasoningFormat,
    Slot,
    ToolFormat,
    XmlCalls,
)

_UNTRAINED = "json"
_HERMES = JsonCalls("<tool_call>", "</tool_call>", space="\n")

_HARMONY = Channels(
    start="<|start|>",
    channel="<|channel|>",
    message="<|message|>",
    constrain="<|constrain|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    reasoning="analysis",
    recipient="to=",
    namespace="functions.",
    words=("assistant", "analysis", "commentary", "final", "json", "code"),
)
_NEXT_MESSAGE = "<|start|>assistant"

# The first whose signs all stand in a template is that template's, so a format comes before those with fewer signs.
_TOOL_FORMATS = (
    # GLM-4.5 to 4.7, of which the last writes no line breaks.
    ToolFormat(
        "glm45",
        XmlCalls(
            function="",
            name_end="",
            function_end="",
            parameter="<arg_key>",
            key_end=("</arg_key>", "<arg_value>"),
            parameter_end="</arg_value>",
            value_break="",
            has_token_tags=True,
        ),
        signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    ),
    ToolFormat(
        "minimax_m2",
        XmlCalls(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            function='<invoke name="',
            name_end='">',
            function_end="</invoke>",
            parameter='<parameter name="',
            key_end=('">',),
            value_break="",
            is_grouped=True,
        ),
        signs=("<minimax:tool_call>", "<invoke name="),
    ),
    ToolFormat(
        "seed_oss",
        XmlCalls("<seed:tool_call>", "</seed:tool_call>", value_break=""),
        signs=("<seed:tool_call>", "<function="),
    ),
    # Qwen3-Coder, Qwen3.5 and later.
    ToolFormat("qwen3_coder", XmlCalls(), signs=("<tool_call>", "<function=", "<parameter=")),
    # Devstral, Magistral, Mistral Small 3.2 and later: tokenizers v11 and v13.
    ToolFormat(
        "mistral",
        NamedCalls("[TOOL_CALLS]", (Slot.NAME, "[ARGS]", Slot.ARGUMENTS), ignored=("[CALL_ID]",)),
        signs=("[TOOL_CALLS]", "[ARGS]"),
    ),
    # Mistral 7B v0.3, Nemo, Small 3.1, Mixtral: tokenizers v3 and v7.
    ToolFormat(
        "mistral_json",
        JsonCalls("[TOOL_CALLS]", listing=Listing.ARRAY),
        signs=("[TOOL_CALLS]",),
    ),
    # V3, V3-0324, R1 and R1-0528: the arguments are a block of Markdown.
    ToolFormat(
        "deepseek_v3",
        NamedCalls(
            "<｜tool▁calls▁begin｜>",
            (
                "<｜tool▁call▁begin｜>",
                "function",
                "<｜tool▁sep｜>",
                Slot.NAME,
                "\n```json\n",
                Slot.ARGUMENTS,
                "\n```",
                "<｜tool▁call▁end｜>",
            ),
            end="<｜tool▁calls▁end｜>",
            separator="\n",
        ),
        signs=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    ToolFormat(
        "deepseek_v31",
        NamedCalls(
            "<｜tool▁calls▁begin｜>",
            ("<｜tool▁call▁begin｜>", Slot.NAME, "<｜tool▁sep｜>", Slot.ARGUMENTS, "<｜tool▁call▁end｜>"),
            end="<｜tool▁calls▁end｜>",
        ),
        signs=("<｜tool▁calls▁begin｜>",),
    ),
    ToolFormat(
        "kimi_k2",
        NamedCalls(
            "<|tool_calls_section_begin|>",
            (
                "<|tool_call_begin|>",
                Slot.NAME,
                "<|tool_call_argument_begin|>",
                Slot.ARGUMENTS,
                "<|tool_call_end|>",
            ),
            end="<|tool_calls_section_end|>",
            namespace="functions.",
            is_numbered=True,
        ),
        signs=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    ),
    # gpt-oss.
    ToolFormat(
        "harmony",
        NamedCalls(
            "<|channel|>commentary to=",
            (Slot.NAME, " <|constrain|>json<|message|>", Slot.ARGUMENTS),
            separator=f"<|end|>{_NEXT_MESSAGE}",
            channels=_HARMONY,
            namespace=_HARMONY.namespace,
        ),
        signs=("<|channel|>commentary", "functions."),
    ),
    # Command A and R7B.
    ToolFormat(
        "cohere",
        JsonCalls(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            name_key="tool_name",
            arguments_key="parameters",
            number_key="tool_call_id",
            listing=Listing.ARRAY,
            array=("[\n    ", ",\n    ", "\n]"),
        ),
        signs=("<|START_ACTION|>", '"tool_name"'),
    ),
    ToolFormat(
        "apertus",
        JsonCalls("<|tools_prefix|>", "<|tools_suffix|>", name_key="", listing=Listing.ARRAY),
        signs=("<|tools_prefix|>",),
    ),
    ToolFormat(
        "hunyuan_a13b",
        JsonCalls("<tool_calls>", "</tool_calls>", listing=Listing.ARRAY),
        signs=("<tool_calls>[",),
    ),
    ToolFormat(
        "longcat",
        JsonCalls("<longcat_tool_call>", "</longcat_tool_call>", space="\n"),
        signs=("<longcat_tool_call>",),
    ),
    # Nemotron Nano 2.
    ToolFormat("nemotron_json", JsonCalls("<TOOLCALL>", "</TOOLCALL>", listing=Listing.ARRAY), signs=("<TOOLCALL>",)),
    # Phi-4-mini: as its documentation has calls, and as templates for vLLM ask for them.
    ToolFormat(
        "phi4_mini", JsonCalls("<|tool_call|>", "<|/tool_call|>", listing=Listing.ARRAY), signs=("<|/tool_call|>",)
    ),
    ToolFormat("phi4_mini_json", JsonCalls("functools", listing=Listing.ARRAY), signs=("functools[",)),
    ToolFormat(
        "olmo3",
        PythonCalls("<function_calls>", "</function_calls>", is_bare=False, is_list=False),
        signs=("<function_calls>", "</function_calls>"),
    ),
    ToolFormat(
        "lfm2", PythonCalls("<|tool_call_start|>", "<|tool_call_end|>", is_bare=False), signs=("<|tool_call_start|>",)
    ),
    ToolFormat(
        "gemma4", BraceCalls("<|tool_call>", "<tool_call|>", '<|"|>'), signs=("<|tool_call>call:", "<tool_call|>")
    ),
    ToolFormat(
        "functiongemma",
        BraceCalls("<start_function_call>", "<end_function_call>", "<escape>"),
        signs=("<start_function_call>call:",),
    ),
    ToolFormat("xlam", JsonCalls(is_bare=True, listing=Listing.ARRAY), signs=("Salesforce xLAM",)),
    # Granite 3.1 to 3.3. Granite 4 writes as Hermes does.
    ToolFormat("granite", JsonCalls("<|tool_call|>", listing=Listing.ARRAY), signs=("<|tool_call|>",)),
    # Hermes 2 and 3, Qwen2.5, QwQ, Qwen3, SmolLM3, Granite 4.
    ToolFormat("hermes", _HERMES, signs=("<tool_call>",)),
    # Llama 3.2 and 4, as Meta's prompts ask for calls; templates for transformers ask for JSON.
    ToolFormat("pythonic", PythonCalls("<|python_start|>", "<|python_end|>"), signs=("[func_name1(",)),
    # Llama 3.1 to 4, whose templates write `<|start_header_id|>` or `<|header_start|>`. They ask for JSON without the
    # marker, which stands before calls of built-in tools.
    ToolFormat(
        "llama3_json",
        JsonCalls("<|python_tag|>", is_bare=True, arguments_key="parameters", separator="; "),
        signs=("header_", '"parameters"'),
    ),
    # SmolLM2, whose template says nothing of tools, and names the model in the system's message.
    ToolFormat(
        "smollm2",
        JsonCalls("<tool_call>", "</tool_call>", listing=Listing.ARRAY),
        signs=("<|im_start|>", "named SmolLM, trained by Hugging Face"),
    ),
    # For a model that was not trained on any: JSON is the whole turn.
    ToolFormat(_UNTRAINED, JsonCalls(is_bare=True, separator="\n")),
)

_REASONING_FORMATS = (
    ReasoningFormat("hunyuan_a13b", "<think>", "</think>", answer=("<answer>", "</answer>"), marks_each_answer=True),
    # Granite 3.3, ERNIE 4.5. MiniMax's templates write results of calls between the same markers.
    ReasoningFormat(
        "granite", "<think>", "</think>", answer=("<response>", "</response>"), unless="<minimax:tool_call>"
    ),
    # DeepSeek, Qwen3, QwQ, SmolLM3 and many others.
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("longcat", "<longcat_think>", "</longcat_think>"),
    ReasoningFormat(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        marks_each_answer=True,
    ),
    ReasoningFormat("gemma4", "<|channel>", "<channel|>", heading="thought"),
    ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    # Magistral and later.
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    # gpt-oss.
    ReasoningFormat(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        answer=("<|channel|>final<|message|>", "<|end|>"),
        next=_NEXT_MESSAGE,
        preamble="<|channel|>commentary<|message|>",
        channels=_HARMONY,
    ),
)

TOOL_FORMATS = {one.name: one for one in _TOOL_FORMATS}
REASONING_FORMATS = {one.name: one for one in _REASONING_FORMATS}


AUTO = "auto"
NONE = "none"
TOOL_FORMAT_NAMES = (AUTO, NONE, *TOOL_FORMATS)
REASONING_FORMAT_NAMES = (AUTO, NONE, *REASONING_FORMATS)


def choose_format(
    tools: str,
    reasoning: str,
    template: str,
    *,
    tool_template: str | None = None,
    template_takes_tools: bool = True,
) -> MessageFormat:
    """The format of these names; of `auto` the one of which the chat template has the signs.

    Without signs there is no reasoning. A template that takes tools is of a format that is not known, so there are no
    calls; with one that does not, the system's message can ask for calls as JSON.

    `template` is the text of the template, empty where the model has none, and `tool_template` that of the one for
    chats with tools, if it is another. Takes names that are known. What `auto` chooses is what one model may write
    beside the other.
    """
    tool_template = template if tool_template is None else tool_template
    chosen_tools = TOOL_FORMATS.get(tools)
    if tools == AUTO:
        known = (one for one in _TOOL_FORMATS if one.signs and all(sign in tool_template for sign in one.signs))
        chosen_tools = next(known, None if template_takes_tools else TOOL_FORMATS[_UNTRAINED])
    chosen_reasoning = REASONING_FORMATS.get(reasoning)
    if reasoning == AUTO:
        # Where a template does not write `begin`, the model does.
        shown = (one for one in _REASONING_FORMATS if all(sign in template for sign in (one.end, *one.answer)))
        chosen_reasoning = next((one for one in shown if not one.unless or one.unless not in template), None)
    chosen = MessageFormat(chosen_tools, chosen_reasoning)
    if not chosen.is_consistent and tools == AUTO:
        of_channels = (one for one in _TOOL_FORMATS if MessageFormat(one, chosen_reasoning).is_consistent)
        return MessageFormat(next(of_channels), chosen_reasoning)
    if not chosen.is_consistent and reasoning == AUTO:
        return MessageFormat(chosen_tools)
    return chosen
