"""What holds for every chat of a family: control tokens come from the template alone, and all else is as in
transformers. Each property is checked with generated chats, and raises AssertionError with one that breaks it. Chats
that the template rejects in transformers are rejected here, too.
"""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from chat_families import Family, chat
from gateway_svc.chat_template import ChatTemplateError, TemplateChat
from gateway_svc.control_tokens import ControlTokens, literal_pattern
from gateway_svc.tokenizer import ModelTokenizer

Chat = list[dict[str, Any]]

# Characters and words that templates and tokenizers treat in a way of their own.
_PARTS = [
    *("hello", "a", "é", "你", "😀", "0", " ", "  ", "\n", "\n\n", "▁", "\t", "A", "\u0301"),
    *("<", "|", ">", "[", "]", "/", "<|", "|>", "<b>", "[INST]", "<<SYS>>", "<|im_", "end|>", "/think", "/no_think"),
    *("\ue000", "\ue001", "\uf8ff", "\U000f0000", "<｜"),
]
_NO_BEGINNINGS = str.maketrans({"<": "(", "[": "(", "＜": "("})


@cache
def encode(family: Family) -> Callable[[Chat], list[int]]:
    """As the gateway encodes chats."""
    copy = Tokenizer.from_str(family.tokenizer.to_str())
    encoder = ModelTokenizer(copy, None, family.template, ())
    return lambda messages: encoder._encode_chat(TemplateChat(messages), None)


@cache
def reference(family: Family) -> Callable[[Chat], list[int]]:
    """As transformers encodes chats."""
    copy = Tokenizer.from_str(family.tokenizer.to_str())
    made = PreTrainedTokenizerFast(tokenizer_object=copy, chat_template=family.source, **family.special_tokens)  # type: ignore[no-untyped-call]

    def encode(messages: Chat) -> list[int]:
        token_ids = made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert isinstance(token_ids, list)
        return [int(token_id) for token_id in token_ids]  # type: ignore[arg-type]

    return encode


def tokens_in_transformers(family: Family, messages: Chat) -> list[int]:
    """As `reference`, for chats that the template takes: no other is generated for the property."""
    try:
        return reference(family)(messages)
    except TemplateError:
        reject()


def texts(*more: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*_PARTS, *more]), max_size=8).map("".join)


@st.composite
def chats(draw: st.DrawFn, family: Family, content: Callable[[str], st.SearchStrategy[str]]) -> Chat:
    """A chat as clients send them; `content` makes texts of a role."""
    roles = ["system"] if "system" in family.roles and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        roles += ["user", "assistant"]
    roles += [draw(st.sampled_from([role for role in family.roles if role in ("user", "tool")]))]
    return chat(*((role, draw(content(role))) for role in roles))


def normalized(family: Family, text: str) -> str:
    normalizer = family.tokenizer.normalizer
    return text if normalizer is None else normalizer.normalize_str(text)


def check_chats_without_literals(family: Family, examples: settings) -> None:
    """Chats without literals of control tokens are encoded as in transformers."""
    literals = family.literals()

    @examples
    @given(chats(family, lambda _: texts()))
    def check(messages: Chat) -> None:
        rendered = normalized(family, "\0".join(message["content"] for message in messages))
        switched = rendered.replace("/no_think", "").replace("/think", "")
        assume(not any(literal in text for literal in literals for text in (rendered, switched)))
        try:
            expected = reference(family)(messages)
        except TemplateError:
            with pytest.raises(ChatTemplateError):
                encode(family)(messages)
            return
        assert encode(family)(messages) == expected

    check()


@cache
def control(family: Family) -> ControlTokens:
    return ControlTokens.find(family.tokenizer, family.template)


def control_ids(family: Family, token_ids: list[int]) -> list[int]:
    ids = {token_id for literal, token_id in control(family).ids.items() if literal != "<unk>"}
    return [token_id for token_id in token_ids if token_id in ids]


def with_literals(family: Family) -> st.SearchStrategy[Chat]:
    """Chats with literals, with parts that join to one, and with what a normalizer makes one of. Answers have none of
    the literals that are tokens there.
    """
    literals = control(family).ids.keys()
    made = [f"<SPECIAL_{switch}10>" for switch in ("/think", "/no_think")] + ["<|IM_END|>", "＜|im_end|＞"]

    def content(role: str) -> st.SearchStrategy[str]:
        kept = control(family).in_answers if role == "assistant" else frozenset()
        return texts(*sorted(literals - kept), *made).filter(lambda text: not any(literal in text for literal in kept))

    return chats(family, content)


def check_control_tokens(family: Family, examples: settings) -> None:
    """Control tokens come from the template alone."""
    literal = literal_pattern(control(family).ids)

    @examples
    @given(with_literals(family))
    def check(messages: Chat) -> None:
        plain = [{**each, "content": literal.sub("zq", each["content"]).translate(_NO_BEGINNINGS)} for each in messages]
        expected = control_ids(family, tokens_in_transformers(family, plain))
        assert control_ids(family, encode(family)(messages)) == expected

    check()


def check_decoded_literals(family: Family, examples: settings) -> None:
    """The tokens of a literal decode to it."""
    literal = literal_pattern(control(family).ids)

    @examples
    @given(with_literals(family))
    def check(messages: Chat) -> None:
        words: dict[str, str] = {}

        def word(text: str) -> str:
            return literal.sub(lambda match: words.setdefault(match[0], f"zq{len(words):03}"), text)

        renamed = [{**each, "content": word(each["content"])} for each in messages]
        tokens_in_transformers(family, renamed)
        expected = family.template.render(TemplateChat(renamed))
        for text, name in words.items():
            expected = expected.replace(name, text)
        decoded = family.tokenizer.decode(encode(family)(messages), skip_special_tokens=False)
        assert bare(family, decoded) == bare(family, expected)

    def bare(family: Family, text: str) -> str:
        """What decoding keeps of any text: Unigram has few pieces here, and spaces are stripped or added."""
        text = "".join(normalized(family, text).replace("▁", " ").split())
        return "".join(filter(str.isascii, text.replace("<unk>", ""))) if family.name == "unigram" else text

    check()


def check_text_beside_literals(family: Family, examples: settings) -> None:
    """The rest of a chat is encoded as without a literal: after it, next to control tokens and where a tokenizer marks
    the first text.
    """
    literal = literal_pattern(control(family).ids)

    @examples
    @given(st.sampled_from(sorted(control(family).ids)), texts(), texts())
    def check(literal_text: str, answer: str, question: str) -> None:
        rest = [("assistant", answer), ("user", question)]
        assume(not any(literal.search(normalized(family, text)) for _, text in rest))
        assume("think" not in answer + question)
        without = segments(family, tokens_in_transformers(family, chat(("user", "a b"), *rest)))
        with_one = segments(family, encode(family)(chat(("user", f"a {literal_text} b"), *rest)))
        assert len(with_one) == len(without)
        assert sum(one != other for one, other in zip(with_one, without, strict=True)) == 1

    check()


def segments(family: Family, token_ids: list[int]) -> list[list[int]]:
    """Tokens between control tokens."""
    found = set(control_ids(family, token_ids))
    return [list(group) for _, group in groupby(token_ids, lambda token_id: token_id if token_id in found else -1)]


PROPERTIES: Mapping[str, Callable[[Family, settings], None]] = {
    "chats without literals are encoded as in transformers": check_chats_without_literals,
    "control tokens come from the template alone": check_control_tokens,
    "tokens of a literal decode to it": check_decoded_literals,
    "the rest of a chat is encoded as without a literal": check_text_beside_literals,
}
