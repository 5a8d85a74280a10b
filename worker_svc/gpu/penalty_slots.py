"""Which sequences have their token counts on the device, and in which slot."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.adjust_logits import fill_token_counts
from worker_svc.sequences import Sequence


class PenaltySlots:
    """Counts of generated tokens, int32 [num_slots, vocab_size], for sequences with penalties.

    There is a slot for each sequence of a step. A new sequence takes the slot that was used longest ago; if its former
    owner comes back, the tokens are counted again: by then the host knows them all.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, upload: Callable[[NDArray[Any]], Tensor]
    ) -> None:
        self.token_counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        # Least recently used first. A sequence that has ended is not kept by its slot.
        self._slots: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._upload = upload

    def of(self, sequences: Items[Sequence]) -> NDArray[np.int64]:
        """The slot of each sequence that is about to sample, at most `num_slots` of them; -1 for one without penalties.

        Filling a slot is enqueued on the device, after the step that may still use it.
        """
        slots = np.full(len(sequences), -1, np.int64)
        penalized = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.params.has_penalties]
        for _, sequence in penalized:
            if sequence in self._slots:
                self._slots[sequence] = self._slots.pop(sequence)
        for row, sequence in penalized:
            if sequence not in self._slots:
                self._slots[sequence] = self._fill(sequence)
            slots[row] = self._slots[sequence]
        return slots

    def _fill(self, sequence: Sequence) -> int:
        slot = self._take()
        tokens = sequence.tokens.values.astype(np.int64)
        prompt, generated = tokens[: sequence.prompt_length], tokens[sequence.prompt_length :]
        if (generated < 0).any():
            raise RuntimeError("a sequence lost its token counts while it had a promised token")
        fill_token_counts(self.token_counts, slot, self._upload(prompt), self._upload(generated))
        return slot

    def _take(self) -> int:
        """A slot that no sequence has, or else the one that was used longest ago."""
        taken = set(self._slots.values())
        free = next((slot for slot in range(len(self.token_counts)) if slot not in taken), None)
        return self._slots.pop(next(iter(self._slots))) if free is None else free
