"""CUDA graphs: the launches of a step, recorded once and then replayed as one."""

from collections.abc import Callable

import torch

Work = Callable[[], None]


class GraphCapture:
    """Captures several pieces of work in one pool of memory.

    The pool is shared, so a graph may overwrite what another one left there: graphs run one after another in one
    stream, and what is needed after a graph's run must be in tensors allocated outside of it.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """The same work on the same addresses, launched as one.

        The work runs once before the capture: kernels are compiled and loaded, and libraries allocate workspaces, at
        first use, and a capture allows neither.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA during the capture, for example to wait for an event.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


def run_without_capture(work: Work) -> Work:
    """Replaces a capture where graphs are off: the work runs once, so that its kernels are compiled."""
    work()
    return work


def keep_work(work: Work) -> Work:
    """Replaces a capture on a CPU, for tests: there are no graphs, and the interpreter compiles nothing."""
    return work
