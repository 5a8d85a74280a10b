"""Chats in the real templates of model families, as tokens: the same as transformers makes, and none of literals.

    python -m tests.acceptance.chat_templates [--examples 25] [--only TEXT]

llama.cpp has these templates, and the source distribution of llama-cpp-python has llama.cpp: it comes from the package
index. The models' tokenizers are not in it. Each template is checked with a byte-level tokenizer, as most of these
models have, and with one of SentencePiece's form. Their control tokens are what looks like one in the template.

The chats are those of the unit tests of the gateway's encoder, and one with a tool, its call and its answer. A template
that rejects a chat in transformers must reject it here.

The last line is JSON. The exit status is 1 if a template breaks a property.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from chat_families import Family, byte_level, chat, ordinary, sentencepiece, special
from chat_families_properties import PROPERTIES, Chat
from gateway_svc.chat_template import ChatTemplate, ChatTemplateError, TemplateChat
from gateway_svc.tokenizer import ModelTokenizer
from tests.peers.suites import SUITES

TEMPLATES = Path("vendor/llama.cpp/models/templates")
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

_SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]{1,40}[|｜]>|\[/?[A-Z][A-Z_]{2,40}\]|<(?:start|end)_of_\w+>|<SPECIAL_\d+>|\]~!?b[\[\]]|\[e~\["
)
_ORDINARY = re.compile(r"</?[a-z][\w:▁-]{0,40}>")
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_ARGUMENTS = {"city": "Zürich", "days": 3}


def markers_in(source: str) -> tuple[set[str], set[str]]:
    """What looks like a special token, and like another control token, in the text of a template."""
    text = ChatTemplate(source, {}).constants
    found = set(_SPECIAL.findall(text))
    return found, set(_ORDINARY.findall(text)) - found - set(SPECIAL_TOKENS.values())


def families_of(path: Path) -> Iterator[Family]:
    """A template with each kind of tokenizer."""
    source = path.read_text()
    specials, ordinaries = (sorted(found) for found in markers_in(source))
    markers = [*special(*specials), *ordinary(*ordinaries)]
    kinds: dict[str, Callable[[], Tokenizer]] = {
        "byte level": lambda: byte_level([*special(*SPECIAL_TOKENS.values()), *markers]),
        "SentencePiece": lambda: sentencepiece(markers, prefix="first"),
    }
    for kind, make in kinds.items():
        family = Family(f"{path.stem}, {kind}", source, make, SPECIAL_TOKENS, ())
        roles = tuple(role for role in ("system", "user", "assistant", "tool") if takes(family, role))
        yield Family(family.name, source, make, SPECIAL_TOKENS, roles)


def takes(family: Family, role: str) -> bool:
    """Whether a template accepts chats with a role where the generated ones have it."""
    turns = {
        "system": [("system", "a"), ("user", "b")],
        "user": [("user", "a"), ("assistant", "b"), ("user", "c")],
        "assistant": [("user", "a"), ("assistant", "b"), ("user", "c")],
        "tool": [("user", "a"), ("assistant", "b"), ("tool", "c")],
    }
    try:
        family.template.render(TemplateChat(chat(*turns[role])))
    except ChatTemplateError:
        return False
    return True


def chat_with_tools(arguments: object) -> Chat:
    """A call of the tool with these arguments, and its answer."""
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Will it rain in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": '{"rain": "no"}'},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Thanks!"},
    ]


def check_tools(family: Family, arguments: object) -> bool:
    """A chat with tools is encoded as in transformers, or rejected as there. Returns whether it is not rejected."""
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(family.tokenizer.to_str()),
        chat_template=family.source,
        **family.special_tokens,
    )
    messages = chat_with_tools(arguments)
    expected: Any = None
    try:
        expected = made.apply_chat_template(
            messages,
            tools=[_TOOL],
            add_generation_prompt=True,
            return_dict=False,
        )
    except Exception:  # a template is a program, and fails in any way
        expected = None
    encoder = ModelTokenizer(Tokenizer.from_str(family.tokenizer.to_str()), None, family.template, ())
    try:
        found = encoder._encode_chat(TemplateChat(messages, tools=[_TOOL]), None)
    except ChatTemplateError:
        found = None
    assert found == expected
    return found is not None


@dataclass
class TemplateOutcome:
    """What was checked of a template, and what it breaks."""

    takes_generated_chats: bool = False
    takes_tools: bool = False
    broken: list[str] = field(default_factory=list)

    def note(self, name: str, check: Callable[[], object]) -> object:
        """Runs a check; returns what it returned, None if it failed."""
        try:
            return check()
        except Exception as error:  # one failure does not end the run
            notes = "\n".join([str(error), *getattr(error, "__notes__", ())])
            print(f"{name}: {type(error).__name__}: {notes[:1500]}", flush=True)
            self.broken.append(name)
        return None


def check_template(path: Path, examples: settings) -> TemplateOutcome:
    """Checks a template with both tokenizers. Some templates take no chats without tools."""
    outcome = TemplateOutcome()
    for family in families_of(path):
        if "user" in family.roles:
            outcome.takes_generated_chats = True
            for name, check in PROPERTIES.items():
                outcome.note(f"{family.name}: {name}", partial(check, family, examples))
        for kind, arguments in (("an object", _ARGUMENTS), ("a text", json.dumps(_ARGUMENTS))):
            name = f"{family.name}: a call with {kind} as arguments is encoded as in transformers"
            outcome.takes_tools |= outcome.note(name, partial(check_tools, family, arguments)) is True
    return outcome


def main() -> None:
    """Parses the flags and checks the templates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=25, help="generated chats for each property; default 25")
    parser.add_argument("--only", default="", help="templates whose names contain this; default: all")
    options = parser.parse_args()
    (suite,) = (suite for suite in SUITES if suite.name == "llama-cpp")
    paths = [path for path in sorted((suite.unpack() / TEMPLATES).glob("*.jinja")) if options.only in path.stem]
    if not paths:
        parser.error(f"no template is named {options.only}")
    examples = settings(
        deadline=None, max_examples=options.examples, database=None, suppress_health_check=list(HealthCheck)
    )
    outcomes = {path.stem: check_template(path, examples) for path in paths}
    broken = {name: outcome.broken for name, outcome in outcomes.items() if outcome.broken}
    summary = {
        "templates": len(paths),
        "passed": len(paths) - len(broken),
        "with_generated_chats": sum(outcome.takes_generated_chats for outcome in outcomes.values()),
        "with_tools": sum(outcome.takes_tools for outcome in outcomes.values()),
        "neither": [
            name
            for name, outcome in outcomes.items()
            if not (outcome.takes_generated_chats or outcome.takes_tools or outcome.broken)
        ],
        "broken": broken,
    }
    print(json.dumps(summary))
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
