"""Random steps of a worker, with whatever requests may ask for, for a device that samples token 0 always."""

import random
from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from svc_common.grammars import load_grammar_tokenizer
from worker_svc.description import WorkerLimits
from worker_svc.grammar import GrammarCompiler
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step, StepOutcome

_PROMPTS, _LONGEST_OUTPUT = (1, 2, 3, 15, 16, 17, 100, 600, 1000, 3000), 400
_END = 1
_GRAMMAR = "start: /a*/"


def letter_grammars(vocab_size: int) -> GrammarCompiler:
    """Grammars over a vocabulary whose token 0 is the letter "a"."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": _END}, unk_token="a"))
    return GrammarCompiler(partial(load_grammar_tokenizer, tokenizer.to_str(), [_END]), vocab_size)


class RandomDrafter:
    """Drafts tokens of which the last may be a wrong one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draft(self, tokens: NDArray[np.int32], max_tokens: int) -> Iterable[int]:
        draft = [0] * self._random.randint(0, max_tokens)
        if draft and self._random.random() < 0.3:
            draft[-1] = 5
        return draft


class RandomTraffic:
    """Prompts in chunks of any size, decodes beside them with and without drafts, log-probabilities of prompts, and all
    kinds of sampling.
    """

    def __init__(self, limits: WorkerLimits, seed: int) -> None:
        self._limits, self._random = limits, random.Random(seed)
        self._lengths: dict[int, tuple[int, int]] = {}  # computed tokens, and those of the prompt
        self._ends: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}
        self._free = list(range(limits.num_blocks))
        self._next_id = 0

    def step(self) -> Step:
        """The next step; it may be empty. `note` takes its outcome before another is made."""
        chosen, finished, scheduled, new = self._random, self._finish(), [], []
        left, longest = self._limits.max_step_tokens, self._limits.context_length
        running = list(self._lengths)
        chosen.shuffle(running)
        has_drafts = chosen.random() < 0.3
        for sequence_id in running if chosen.random() < 0.6 else running[: chosen.randint(0, len(running))]:
            computed, prompt = self._lengths[sequence_id]
            decodes = computed >= prompt
            size = 1 if decodes else chosen.choice((1, 2, 15, 16, 17, 100, 512, 2048))
            if num_tokens := min(size, max(1, prompt - computed), left):
                drafts = min(
                    chosen.randint(0, self._limits.max_draft_tokens) if has_drafts and decodes else 0, left - 1
                )
                scheduled.append(self._schedule(sequence_id, num_tokens, drafts))
                left -= num_tokens + drafts
        while left and len(self._lengths) < self._limits.max_sequences and chosen.random() < 0.5:
            prompt = chosen.choice([length for length in _PROMPTS if length + _LONGEST_OUTPUT <= longest])
            sequence_id, self._next_id = self._next_id, self._next_id + 1
            result, num_top = ("prompt_logprobs", chosen.choice((0, 1, 5))) if chosen.random() < 0.1 else ("tokens", 0)
            sampling = self._sampling()
            new.append(
                NewSequence(sequence_id, [3] * prompt, prompt, 0, sampling, result=result, num_top_of_prompt=num_top)
            )
            self._lengths[sequence_id], self._blocks[sequence_id] = (0, prompt), []
            self._ends[sequence_id] = prompt + chosen.randint(5, _LONGEST_OUTPUT - self._limits.max_draft_tokens)
            num_tokens = min(prompt, left, chosen.choice((1, 16, 300, 2048)))
            scheduled.append(self._schedule(sequence_id, num_tokens))
            left -= num_tokens
        return Step(finished, new, scheduled)

    def note(self, outcome: StepOutcome) -> None:
        """Continues each sequence after the tokens that it has: with a draft there are several, without the mask of its
        grammar none. Raises RuntimeError if a sequence failed.
        """
        for result in outcome.sequences:
            if result.failure is not None:
                raise RuntimeError(f"a step failed: {result.failure}")
            computed, prompt = self._lengths[result.sequence_id]
            if computed >= prompt:
                self._lengths[result.sequence_id] = computed + len(result.token_ids) - 1, prompt

    def _schedule(self, sequence_id: int, num_tokens: int, max_extra_tokens: int = 0) -> ScheduledSequence:
        computed, prompt = self._lengths[sequence_id]
        self._lengths[sequence_id] = computed + num_tokens, prompt
        blocks = self._blocks[sequence_id]
        num_needed = -(-(computed + num_tokens + max_extra_tokens) // self._limits.block_size) - len(blocks)
        added = [self._free.pop() for _ in range(num_needed)]
        blocks += added
        return ScheduledSequence(sequence_id, computed, num_tokens, added, max_extra_tokens=max_extra_tokens)

    def _finish(self) -> list[int]:
        finished = [one for one, (computed, _) in self._lengths.items() if computed >= self._ends[one]]
        for sequence_id in finished:
            del self._lengths[sequence_id], self._ends[sequence_id]
            self._free += self._blocks.pop(sequence_id)
        return finished

    def _sampling(self) -> SamplingParams:
        choice = self._random.choice
        return SamplingParams(
            temperature=choice((0.0, 1.0)),
            top_p=choice((1.0, 0.9)),
            top_k=choice((0, 1, 40)),
            min_p=choice((0.0, 0.05)),
            typical_p=choice((0.0, 0.0, 0.0, 0.9)),
            repetition_penalty=choice((1.0, 1.1)),
            logprobs=choice((None, None, None, 0, 1, 5, 20)),
            min_tokens=choice((0, 3)),
            suppressed_token_ids=(1, 2),
            logit_bias=dict.fromkeys(range(choice((0, 0, 1, 300, 1500))), 1.0),
            allowed_token_ids=choice(((), (), (), (0, 7))),
            bad_words=choice(((), (), (), ((4, 5), (6,)))),
            grammar=choice(("", "", "", _GRAMMAR)),
            seed=self._random.getrandbits(63),
        )
