"""The interface of a forward pass on the host."""

from typing import Protocol

from torch import Tensor

from worker_svc.batch import Batch


class Forward(Protocol):
    """A model over its own paged cache. For one thread, under `torch.inference_mode`."""

    def __call__(self, batch: Batch) -> Tensor:
        """Computes a step's tokens and stores their keys and values in their slots.

        Returns the logits float32 [num_samples, vocab_size] that follow the tokens at `batch.logits_indices`. Rows that
        `batch.needs_logits` leaves out are undefined. The next call may overwrite them.
        """
