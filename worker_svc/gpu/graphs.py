"""CUDA graphs: what a step launches, recorded once and from then on launched as a whole."""

from collections.abc import Callable

import torch

Work = Callable[[], None]

_DENSE, _SPACING = (1, 2, 4), 8


def capture_sizes(max_rows: int) -> list[int]:
    """The batch sizes that graphs are captured for, in rising order: 1, 2, 4, 8, 16, 24 and so on, and the largest.

    A batch is filled up to the next of them: by less than 8 rows, which cost next to nothing where reading the weights
    takes the time.
    """
    sizes = [*_DENSE, *range(_SPACING, max_rows, _SPACING), max_rows]
    return sorted({size for size in sizes if size <= max_rows})


class GraphCapture:
    """Captures one piece of work after another, in one pool of memory.

    The pool is shared, so a graph may overwrite what another one left there: graphs run one after another in one
    stream, and what outlives a graph's run must be in tensors made outside of it.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """The same work from the same addresses, launched as a whole.

        It is run once before: kernels are compiled and loaded, and libraries take their workspaces, when they are first
        used, and neither may happen in a capture.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads' calls into CUDA, such as a wait for an event, are none of the capture's business.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


def run_without_capture(work: Work) -> Work:
    """In place of a capture where there are no graphs: a processor, in tests."""
    work()
    return work
