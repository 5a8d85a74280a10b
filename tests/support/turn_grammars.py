"""Grammars of turns over a small vocabulary: what they admit, random turns of them, and what the parser reads."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway_svc.message_formats.description import BraceCalls, MessageFormat, PythonCalls, XmlCalls
from gateway_svc.message_formats.events import MessageEvent, ToolArgumentsDelta, ToolCallBegin, join_events
from gateway_svc.message_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.message_formats.grammar import ReasoningRule, TurnGrammar
from gateway_svc.message_formats.layout import write_calls
from gateway_svc.message_formats.parser import MessageParser

_END = "<|endoftext|>"

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer of single bytes and some added tokens."""

    tokenizer: Tokenizer
    for_grammars: LLTokenizer
    control_tokens: Mapping[str, int]

    @classmethod
    def of(cls, control_tokens: Sequence[str]) -> "Vocabulary":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        # Qwen's markers are added tokens that are not special, Mistral's are special.
        tokenizer.add_tokens([AddedToken(one, special=one.startswith(("[", "<|"))) for one in control_tokens])
        ids = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        for_grammars = LLTokenizer(tokenizer.to_str(), eos_token=ids.pop(_END))
        return cls(tokenizer, for_grammars, ids)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def matcher(self, grammar: TurnGrammar) -> LLMatcher:
        matcher = LLMatcher(self.for_grammars, grammar.to_lark(), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        assert matcher.get_grammar_warnings() == []
        return matcher

    def admits(self, grammar: TurnGrammar, text: str) -> bool:
        """Whether a turn may be this text."""
        matcher = self.matcher(grammar)
        return matcher.consume_tokens(self.encode(text)) and matcher.is_accepting()

    def begins(self, grammar: TurnGrammar, text: str) -> bool:
        """Whether a turn may begin with this text."""
        tokens = self.encode(text)
        return self.matcher(grammar).validate_tokens(tokens) == len(tokens)

    def parse(self, grammar: TurnGrammar, token_ids: Sequence[int]) -> list[MessageEvent]:
        parser = MessageParser(
            grammar.message_format,
            grammar.tools,
            control_tokens=self.control_tokens,
            reasoning_is_open=grammar.reasoning is ReasoningRule.OPEN,
        )
        literals = {token_id: literal for literal, token_id in self.control_tokens.items()}
        events = []
        text: list[int] = []
        for token_id in [*token_ids, -1]:
            if token_id in literals or token_id == -1:
                events += parser.feed(self.tokenizer.decode(text))
                text = []
                if token_id != -1:
                    events += parser.feed(literals[token_id], is_control=True)
            else:
                text.append(token_id)
        return join_events([*events, *parser.end()])


ALL_MARKERS = sorted(
    {marker for one in TOOL_FORMATS.values() for marker in one.calls.markers}
    | {marker for one in REASONING_FORMATS.values() for marker in one.markers}
)
BY_PARAMETER = tuple(
    name for name, one in TOOL_FORMATS.items() if isinstance(one.calls, BraceCalls | PythonCalls | XmlCalls)
)
"""Formats in which each parameter is written by itself."""
VOCABULARIES = {"tokens": Vocabulary.of([_END, *ALL_MARKERS]), "text": Vocabulary.of([_END])}


def with_reasoning(name: str) -> MessageFormat:
    """The format of calls of this name, beside one of reasoning that a model may have with it."""
    found = (MessageFormat(TOOL_FORMATS[name], REASONING_FORMATS[one]) for one in ("think", "harmony"))
    return next(one for one in found if one.is_consistent)


def calls_of(events: Sequence[MessageEvent]) -> list[Call]:
    names = [event.name for event in events if isinstance(event, ToolCallBegin)]
    arguments = [json.loads(event.fragment) for event in events if isinstance(event, ToolArgumentsDelta)]
    return list(zip(names, arguments, strict=True))


def written(name: str, *calls: Call) -> str:
    return write_calls(TOOL_FORMATS[name].calls, calls)


def random_turn(vocabulary: Vocabulary, grammar: TurnGrammar, rng: random.Random) -> list[int]:
    """Tokens of a turn, each drawn from those that the grammar allows, without white space where there is a choice."""
    matcher = vocabulary.matcher(grammar)
    end, spaces = vocabulary.tokenizer.token_to_id(_END), set(vocabulary.encode(" \n\t"))
    tokens: list[int] = []
    while True:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(vocabulary.for_grammars.vocab_size) if mask[token // 8] >> token % 8 & 1]
        token = rng.choice([one for one in allowed if one not in spaces] or allowed)
        if token == end:
            return tokens
        assert matcher.consume_token(token)
        tokens.append(token)
        if matcher.is_stopped():
            return tokens
