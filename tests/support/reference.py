"""Greedy continuations by transformers in float32: the reference for every token that Quire returns."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kept_files import kept

NEW_TOKENS = 64
TIE = 0.001  # if the two largest logits are this close, both tokens are correct
MAX_TIES = 3
DRAFTS = Path(__file__).with_name("reference_drafts.json")
"""What the continuations are likely to be: those found last. A model checks all tokens of a draft in one pass, which
takes a tenth of the time of generating them; a wrong draft costs time and changes no reference."""

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 700)

TEXT = """A quire is a gathering of pages. In the days before printing, a scribe took four sheets of parchment, laid \
one upon the other, folded them once, and had sixteen sides to write on. When a quire was full it was set aside to \
dry, and the next one was begun; at the end all of them were sewn together, in order, and bound between boards of oak. \
Nobody could say, from the outside of a book, in which order its quires had been written, nor how many hands had \
worked on it at the same time. A workshop that knew its trade kept several scribes busy from one exemplar: it lent the \
exemplar out quire by quire, so that while one scribe copied the third, another had the second, and a student who \
needed only the beginning did not have to wait for the end. The stationers of Bologna and Paris wrote lists of what \
each quire cost to borrow, and for how long. If a quire was lost, only that quire had to be copied again. If two \
customers asked for the same work, the first pages of both were the same pages, and a careful stationer did not copy \
them twice. There were rules about who came first. A master who lectured in the morning had his pages before the \
student who read them in the evening, but no one was to wait for ever, and a complaint could be brought before the \
rector. The account books that have come down to us show how well it worked: on a day in March one stationer had \
ninety-one quires out with forty-three borrowers, and by the feast of Saint John all but two were back on the shelf. \
The two had been carried off by a student who left the city in debt, and the book says so, with his name. """


@dataclass(frozen=True)
class Reference:
    """A prompt, its greedy continuation, and the positions at which the choice was a tie."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    ties: frozenset[int]

    def judge(self, served: tuple[int, ...] | list[int]) -> bool:
        """Returns whether the comparison ended at a tie. Raises AssertionError for a wrong token."""
        assert len(served) == len(self.tokens), f"{len(served)} tokens instead of {len(self.tokens)}"
        for place, (ours, theirs) in enumerate(zip(served, self.tokens, strict=True)):
            if ours != theirs:
                assert place in self.ties, f"prompt of {len(self.prompt)}: token {place} is {ours}, not {theirs}"
                return True
        return False


def prompts(model: Path) -> list[tuple[int, ...]]:
    """40 prompts: for each length of LENGTHS and for four more, one of real text and one of random tokens."""
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer(TEXT * 4)["input_ids"]
    vocab_size = len(tokenizer)
    found = []
    for place, length in enumerate((*LENGTHS, 5, 48, 129, 400)):
        start = 7 * place
        found.append(tuple(text[start : start + length]))
        found.append(tuple(rng.randrange(vocab_size) for _ in range(length)))
    return found


def references(model: Path) -> list[Reference]:
    """Continues each of `prompts` by NEW_TOKENS with transformers, in float32, ignoring end-of-text."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = prompts(model)
    drafts = json.loads(DRAFTS.read_bytes()).get(_depth(network), [()] * len(found))
    return [_continue(network, prompt, tuple(draft)) for prompt, draft in zip(found, drafts, strict=True)]


def kept_references(model: Path) -> list[Reference]:
    """The result of `references`, kept in pytest's cache, because it takes half a minute.

    It is recomputed when the model, the libraries or this module change.
    """
    weights = (model / "model.safetensors").stat()
    origin = (transformers.__version__, torch.__version__, weights.st_size, weights.st_mtime_ns)

    def write(file: Path) -> None:
        file.write_text(json.dumps([[r.prompt, r.tokens, sorted(r.ties)] for r in references(model)]))

    read = json.loads(kept("references", __file__, origin, write).read_bytes())
    return [Reference(tuple(prompt), tuple(tokens), frozenset(ties)) for prompt, tokens, ties in read]


def write_drafts(models: Sequence[Path]) -> None:
    """Writes what transformers continues by as the drafts of the next time."""
    drafts = {}
    for model in models:
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        drafts[_depth(network)] = [_continue(network, prompt, ()).tokens for prompt in prompts(model)]
    DRAFTS.write_text(json.dumps(drafts, separators=(",", ":")) + "\n")


def _depth(network: Any) -> str:
    return f"{network.config.num_hidden_layers} layers"


def _continue(network: Any, prompt: tuple[int, ...], draft: tuple[int, ...]) -> Reference:
    """Checks the draft in one pass, and generates what follows its first wrong token."""
    given = torch.tensor([prompt + draft[: NEW_TOKENS - 1]])
    with torch.inference_mode():
        logits = network(given, logits_to_keep=given.shape[1] - len(prompt) + 1).logits[0]
    chosen = logits.argmax(dim=1).tolist()
    num_right = next((place for place, token in enumerate(draft) if token != chosen[place]), len(draft))
    tokens, best = tuple(chosen[: num_right + 1]), logits[: num_right + 1]
    if len(tokens) < NEW_TOKENS:
        answer = network.generate(
            torch.tensor([prompt + tokens]),
            max_new_tokens=NEW_TOKENS - len(tokens),
            min_new_tokens=NEW_TOKENS - len(tokens),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens += tuple(answer.sequences[0, len(prompt) + len(tokens) :].tolist())
        best = torch.cat([best, *answer.logits])
    two = best.topk(2).values  # [NEW_TOKENS, 2]
    return Reference(prompt, tokens, frozenset((two[:, 0] - two[:, 1] < TIE).nonzero()[:, 0].tolist()))
