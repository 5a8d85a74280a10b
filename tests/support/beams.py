"""Beam search of transformers in float32: the reference for Quire's."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Search:
    """A prompt with the parameters of its beam search."""

    prompt: tuple[int, ...]
    width: int
    n: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_tokens: int = 24


@dataclass(frozen=True)
class Found:
    """A sequence up to and including its end-of-text token, if it has one, and its score."""

    token_ids: tuple[int, ...]
    score: float


class BeamJudge:
    """The model in transformers."""

    def __init__(self, model: Path) -> None:
        self._network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.eos_token_id: int = self._network.generation_config.eos_token_id
        self._known: dict[Search, list[Found]] = {}

    def search(self, search: Search) -> list[Found]:
        """The best sequences, the best one first. The result of a search is kept."""
        if search not in self._known:
            self._known[search] = self._search(search)
        return self._known[search]

    def _search(self, search: Search) -> list[Found]:
        answer = self._network.generate(
            torch.tensor([search.prompt]),
            attention_mask=torch.ones(1, len(search.prompt), dtype=torch.long),
            max_new_tokens=search.max_tokens,
            do_sample=False,
            num_beams=search.width,
            num_return_sequences=search.n,
            length_penalty=search.length_penalty,
            early_stopping=search.early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
        outputs = [tokens[len(search.prompt) :].tolist() for tokens in answer.sequences]
        scores: list[float] = answer.sequences_scores.tolist()
        return [Found(self._cut(tokens), score) for tokens, score in zip(outputs, scores, strict=True)]

    def _cut(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Removes the padding after the end."""
        eos = self.eos_token_id
        return tuple(tokens[: tokens.index(eos) + 1] if eos in tokens else tokens)
