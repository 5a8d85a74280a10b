"""The forward pass of a step: what a host's executor asks of a model, however it is computed."""

from typing import Protocol

import torch
from torch import Tensor

from worker_svc.attention import AttentionBackend
from worker_svc.batch import Batch
from worker_svc.model.llama import LlamaModel


class Forward(Protocol):
    """A model over its own paged cache. For one thread, under `torch.inference_mode`."""

    def __call__(self, batch: Batch) -> Tensor:
        """Compute a step's tokens, whose keys and values go into their slots.

        Returns the logits float32 [num_draws, vocab_size] that follow the tokens at `batch.logits_indices`. They may be
        overwritten by the next call.
        """


class EagerForward:
    """The native modules, operator by operator."""

    def __init__(self, model: LlamaModel, attention: AttentionBackend) -> None:
        self._model, self._attention = model, attention

    def __call__(self, batch: Batch) -> Tensor:
        device = self._model.device
        return self._model.forward(
            torch.from_numpy(batch.token_ids).to(device),
            torch.from_numpy(batch.positions).to(device),
            self._attention.plan(batch),
            torch.from_numpy(batch.logits_indices).to(device),
        )
