"""The forward pass of a step: what a host's executor asks of a model, however it is computed."""

from typing import Protocol

from torch import Tensor

from worker_svc.batch import Batch


class Forward(Protocol):
    """A model over its own paged cache. For one thread, under `torch.inference_mode`."""

    def __call__(self, batch: Batch) -> Tensor:
        """Compute a step's tokens, whose keys and values go into their slots.

        Returns the logits float32 [num_draws, vocab_size] that follow the tokens at `batch.logits_indices`. They may be
        overwritten by the next call.
        """
