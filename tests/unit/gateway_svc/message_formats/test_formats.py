"""Which format a chat template is of."""

import pytest

from chat_families import FAMILIES
from gateway_svc.chat_template import ChatTemplate
from gateway_svc.message_formats.formats import REASONING_FORMATS, TOOL_FORMATS, choose_format
from svc_common.preparation import DEFAULT_MODEL_FILES
from tool_families import CALLING_FAMILIES, TOOL_FAMILIES


def constants(source: str) -> str:
    return ChatTemplate(source, {}).constants


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("hermes", "hermes"),
        ("llama3.1", "llama3_json"),
        ("mistral v3", "mistral_json"),
        ("deepseek v3", "deepseek_v3"),
        ("qwen3-coder", "qwen3_coder"),
        ("mistral small 3.2", "mistral"),
        ("granite 3.3", "granite"),
        ("llama3.2", "pythonic"),
        ("deepseek v3.1", "deepseek_v31"),
        ("smollm2", "smollm2"),
        ("gpt-oss", "harmony"),
        ("glm 4.6", "glm45"),
        ("kimi k2", "kimi_k2"),
        ("minimax m2", "minimax_m2"),
        ("seed-oss", "seed_oss"),
        ("gemma 4", "gemma4"),
        ("functiongemma", "functiongemma"),
    ],
)
def test_a_template_that_writes_calls_has_their_format(family: str, name: str) -> None:
    chosen = choose_format("auto", "auto", constants(CALLING_FAMILIES[family].source))
    assert chosen.tools is TOOL_FORMATS[name]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (
            '<|header_start|>user<|header_end|>Respond in the format {"name": function name, "parameters": dictionary}',
            "llama3_json",
        ),
        ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "', "cohere"),
        ("{% set begin = '<|tools_prefix|>' %}", "apertus"),
        ('<tool_calls>[{"name": "func_name1"', "hunyuan_a13b"),
        ("<longcat_tool_call>", "longcat"),
        ("<TOOLCALL>", "nemotron_json"),
        ("<|tool_call|>{}<|/tool_call|>", "phi4_mini"),
        ('functools[{"name": [function name]', "phi4_mini_json"),
        ("<|im_start|>assistant <function_calls> </function_calls>", "olmo3"),
        ("<|tool_call_start|>[", "lfm2"),
        ("You are developed by Salesforce xLAM team.", "xlam"),
        # EXAONE 4 and ERNIE 4.5.
        ('[|tool|] <tool_call>{"name": function_1_name, "arguments": {}}</tool_call>', "hermes"),
    ],
)
def test_other_templates_with_calls(source: str, name: str) -> None:
    chosen = choose_format("auto", "auto", constants(source))
    assert chosen.tools is TOOL_FORMATS[name]


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "<|start_header_id|>", "<|channel|>analysis<|message|>", "<CALL>"]
)
def test_a_template_without_known_signs_has_no_format(source: str) -> None:
    assert choose_format("auto", "auto", constants(source)) == choose_format("none", "none", constants(source))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ content.split('</think>') }}", "think"),
        ("First draft your thoughts: [THINK]…[/THINK]", "mistral"),
        ("thoughts between <think></think>, response between <response></response>", "granite"),
        (CALLING_FAMILIES["gpt-oss"].source, "harmony"),
        (CALLING_FAMILIES["seed-oss"].source, "seed_oss"),
        (CALLING_FAMILIES["minimax m2"].source, "think"),
        ("{{ content.split('</think>') }} <answer>{{ x }}</answer>", "hunyuan_a13b"),
        ("<longcat_think>{{ x }}</longcat_think>", "longcat"),
        ("{{- '<|channel>thought\\n' }}{{- '<channel|>' }}", "gemma4"),
        ("<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>", "cohere"),
        ("{% set begin, end = '<|inner_prefix|>', '<|inner_suffix|>' %}", "apertus"),
    ],
)
def test_a_template_that_shows_reasoning_has_its_format(source: str, name: str) -> None:
    assert choose_format("none", "auto", constants(source)).reasoning is REASONING_FORMATS[name]


def test_settings_come_before_the_template() -> None:
    template = constants(TOOL_FAMILIES["hermes"].source)
    chosen = choose_format("json", "none", template)
    assert (chosen.tools, chosen.reasoning) == (TOOL_FORMATS["json"], None)
    chosen = choose_format("none", "mistral", template)
    assert (chosen.tools, chosen.reasoning) == (None, REASONING_FORMATS["mistral"])


def test_what_is_chosen_stands_beside_what_is_set() -> None:
    template = constants(CALLING_FAMILIES["gpt-oss"].source)
    assert choose_format("hermes", "auto", template).reasoning is None
    without_calls = template.replace("<|channel|>commentary", "")
    assert choose_format("auto", "auto", without_calls, template_takes_tools=False).tools is TOOL_FORMATS["harmony"]
    assert not choose_format("hermes", "harmony", template).is_consistent


def test_families_without_tools_show_no_calls() -> None:
    with_calls = {name for name, one in FAMILIES.items() if choose_format("auto", "auto", constants(one.source)).tools}
    assert with_calls == set()


def test_a_template_that_does_not_take_tools_has_json() -> None:
    for family in FAMILIES.values():
        chosen = choose_format("auto", "auto", constants(family.source), template_takes_tools=False)
        assert chosen.tools is TOOL_FORMATS["json"]
    assert choose_format("none", "auto", "{{ messages }}", template_takes_tools=False).tools is None


def test_the_default_model_has_its_own_format() -> None:
    source = (DEFAULT_MODEL_FILES / "chat_template.jinja").read_text()
    assert choose_format("auto", "auto", constants(source), template_takes_tools=False).tools is TOOL_FORMATS["smollm2"]


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_may_open_the_reasoning(prompt: str, is_open: bool) -> None:
    assert REASONING_FORMATS["think"].is_open_in(prompt) is is_open


@pytest.mark.parametrize(
    ("answer", "is_open"),
    [
        ("<think>I should", True),
        ("\n<think>\nI should " + "think " * 100, True),
        ("<think>I should</think>", False),
        ("<think>I should</think>\n\nYes: <think> begins", False),
        ("<think>I</think>\n<think>should", True),
        ("The tag <think> begins", False),
    ],
)
def test_an_answer_that_is_continued_may_open_the_reasoning(answer: str, is_open: bool) -> None:
    assert REASONING_FORMATS["think"].is_open_in(answer[-20:], answer) is is_open


def test_calls_are_of_the_template_of_chats_with_tools() -> None:
    template = constants(TOOL_FAMILIES["hermes"].source)
    assert (
        choose_format("auto", "auto", f"[TOOL_CALLS]\0{template}", tool_template=template).tools
        is TOOL_FORMATS["hermes"]
    )
