"""Bias, penalties and suppression of the affected tokens, in the documented order, as on the CPU."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_kernels.adjust_logits import (
    SUPPRESSED,
    LogitEntries,
    Penalties,
    adjust_logits,
    adjust_logits_reference,
    fill_token_counts,
)
from worker_svc.penalties import Adjustments
from worker_svc.penalties import adjust_logits as adjust_on_processor
from worker_svc.step import SamplingParams

Entries = list[tuple[int, int, float]]


def make_entries(entries: Entries, device: str) -> LogitEntries:
    rows, tokens, values = zip(*entries, strict=True)
    return LogitEntries(
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def make_penalties(params: list[SamplingParams], vocab_size: int, device: str, slots: list[int]) -> Penalties:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=torch.float32, device=device)

    counts = torch.full((max(slots) + 2, vocab_size), 77, dtype=torch.int32, device=device)
    places = torch.tensor(slots, device=device)
    repetition, frequency, presence = (column(f"{kind}_penalty") for kind in ("repetition", "frequency", "presence"))
    return Penalties(places, repetition, frequency, presence, counts)


# A very small factor gives infinities, which are then clamped.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("vocab_size", [97, 2048, 4099])
def test_as_the_processors_path_has_it(vocab_size: int, device: str) -> None:
    rng = np.random.default_rng(0)
    suppressed = (0, 3, vocab_size - 1)
    params = [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.7, presence_penalty=-1.5),
        SamplingParams(frequency_penalty=0.3),
        SamplingParams(presence_penalty=0.9, logit_bias={5: 2.5, 96: -100.0}),
        SamplingParams(repetition_penalty=2.0, frequency_penalty=-0.1, logit_bias={7: 1.0, 8: 4.0},
                       min_tokens=99, suppressed_token_ids=suppressed),
        SamplingParams(min_tokens=99, suppressed_token_ids=suppressed),
        SamplingParams(repetition_penalty=1e-40),
    ]  # fmt: skip
    penalties = make_penalties(params, vocab_size, device, [-1, 4, 2, 0, 7, 3, -1, 1])
    tokens = [rng.integers(vocab_size, size=60).astype(np.int32) for _ in params]
    for slot, known in zip(penalties.slots.tolist(), tokens, strict=True):
        if slot >= 0:
            ids = torch.from_numpy(known).long().to(device)
            fill_token_counts(penalties.token_counts, slot, ids[:40], ids[40:])
    entries = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()]
    entries += [(row, token, -math.inf) for row, p in enumerate(params) for token in p.suppressed_token_ids]
    entries += [(-1, 5, 3.0), (-1, 2**31 - 1, -math.inf)]
    logits = torch.from_numpy(rng.normal(size=(len(params), vocab_size + 2)).astype(np.float32)) * 5
    logits = logits[:, :vocab_size]

    expected = logits.clone()
    adjust_on_processor(expected, [Adjustments(p, known, 40) for p, known in zip(params, tokens, strict=True)])
    by_reference, actual = logits.clone().to(device), logits.clone().to(device)
    adjust_logits_reference(by_reference, make_entries(entries, device), penalties)
    adjust_logits(actual, make_entries(entries, device), penalties)
    for seen in (actual.cpu(), by_reference.cpu()):
        assert torch.equal(seen == SUPPRESSED.value, expected == -math.inf)
        torch.testing.assert_close(seen[expected > -math.inf], expected[expected > -math.inf], rtol=1e-6, atol=1e-6)


def test_what_is_no_number_stays(device: str) -> None:
    faults = [math.nan, math.inf, -math.inf]
    logits = torch.tensor([[*faults, 1.0], [*faults, 1.0]], device=device)
    before = logits.clone()
    penalties = make_penalties([SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)] * 2, 4, device, [0, 1])
    for slot in (0, 1):
        fill_token_counts(
            penalties.token_counts, slot, torch.tensor([0, 1, 2], device=device), torch.tensor([0], device=device)
        )
    entries = [(0, 0, 1.0), (0, 1, 1.0), (0, 2, 1.0), (1, 0, -math.inf), (1, 1, -math.inf), (1, 2, -math.inf)]
    adjust_logits(logits, make_entries(entries, device), penalties)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def test_a_slot_remembers_its_own_sequence_alone(device: str) -> None:
    counts = torch.full((3, 6), 9, dtype=torch.int32, device=device)
    fill_token_counts(counts, 1, torch.tensor([1, 1, 2], device=device), torch.tensor([2, 3, 3], device=device))
    assert bool((counts[[0, 2]] == 9).all())
    assert (counts[1] & 0x7FFFFFFF).tolist() == [0, 0, 1, 2, 0, 0]
    assert (counts[1] < 0).tolist() == [False, True, True, False, False, False]


def test_neither_entries_nor_penalties_change_nothing(device: str) -> None:
    logits = torch.randn(2, 5, device=device)
    before = logits.clone()
    adjust_logits(logits, None, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("logits", lambda logits: logits.half()),
        ("logits", lambda logits: logits.T),
        ("entries.rows", lambda rows: rows.long()),
        ("entries.tokens", lambda tokens: tokens[1:]),
        ("entries.values", lambda values: values.double()),
        ("penalties.slots", lambda slots: slots.int()),
        ("penalties.repetition", lambda values: values[1:]),
        ("penalties.frequency", lambda values: values.half()),
        ("penalties.presence", lambda values: values[:, None]),
        ("penalties.token_counts", lambda counts: counts[:, 1:]),
        ("penalties.token_counts", lambda counts: counts.long()),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Any], Any], device: str) -> None:
    logits = torch.zeros(3, 7, device=device)
    entries = make_entries([(0, 1, 1.0), (1, 1, 1.0)], device)
    penalties = make_penalties([SamplingParams()] * 3, 7, device, [0, 1, 2])
    owner, _, name = argument.rpartition(".")
    if owner:
        changed = {"entries": entries, "penalties": penalties}[owner]
        object.__setattr__(changed, name, change(getattr(changed, name)))
    else:
        logits = change(logits)
    with pytest.raises(ValueError, match=f"^{argument}: "):
        adjust_logits(logits, entries, penalties)
