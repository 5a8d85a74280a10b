"""How models that fill gaps take the text around one, by special tokens of their vocabularies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.unvalidated_request import InfillPrompt, TextPrompt, UnvalidatedRequest
from gateway_svc.validated_request import Echo


class Side(Enum):
    """A text beside the gap."""

    BEFORE = "before"
    AFTER = "after"


_BEFORE, _AFTER = Side.BEFORE, Side.AFTER

# As the models' cards have them.
_FORMS: Sequence[Sequence[str | Side]] = (
    ("<|fim_prefix|>", _BEFORE, "<|fim_suffix|>", _AFTER, "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", _BEFORE, "<fim_suffix>", _AFTER, "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", _BEFORE, "<fim-suffix>", _AFTER, "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", _BEFORE, "<｜fim▁hole｜>", _AFTER, "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", _BEFORE, "<|code_suffix|>", _AFTER, "<|code_middle|>"),  # GLM
    ("[SUFFIX]", _AFTER, "[PREFIX]", _BEFORE),  # Codestral
)

# What such models write behind the text that fills the gap: the file ends, or another one begins.
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|repo_name|>", "<reponame>")


@dataclass(frozen=True, slots=True)
class InfillForm:
    """The parts of a prompt in their order, and tokens that end the answer beside end-of-text."""

    parts: Sequence[str | Side]
    end_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, added: Mapping[str, int]) -> "InfillForm | None":
        """The form of a model with these added tokens, by literal; None: it fills no gaps."""
        for parts in _FORMS:
            marks = [part for part in parts if isinstance(part, str)]
            if all(mark in added for mark in marks):
                return cls(parts, tuple(added[one] for one in (*marks, *_ENDS) if one in added))
        return None

    def prompt(self, before: str, after: str) -> str:
        """The prompt as a text."""
        texts = {_BEFORE: before, _AFTER: after}
        return "".join(part if isinstance(part, str) else texts[part] for part in self.parts)


def infill_text(prompt: InfillPrompt, form: InfillForm | None, check: FieldChecker) -> TextPrompt:
    """The texts around a gap as a model of this form takes them. Raises QuireError."""
    if form is None:
        raise check.unsupported(Field.SUFFIX, "this model has no tokens for it")
    check.unicode(check.field_path(Field.SUFFIX), prompt.after)
    return TextPrompt(form.prompt(prompt.before, prompt.after), prompt.add_special_tokens)


def check_infilling(unvalidated: UnvalidatedRequest, check: FieldChecker) -> None:
    """What prompts with a gap are not served with. Raises QuireError."""
    if not isinstance(unvalidated.prompt, InfillPrompt):
        return
    if unvalidated.truncate_prompt_tokens is not None:  # the tokens around both texts would be lost
        raise check.unsupported(Field.SUFFIX, "is not served with truncate_prompt_tokens")
    if unvalidated.echo is not Echo.ABSENT:
        raise check.unsupported(Field.SUFFIX, "is not served with echo")
