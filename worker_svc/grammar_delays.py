"""Sequences whose grammar is not compiled yet do not sample in a step, so that the others do not wait for them."""

from concurrent.futures import wait

from worker_svc.launched_step import ScheduledRun

# For which a step waits for the grammars of its new sequences; or of all, if it has no others. Usual grammars are
# compiled in 1 ms.
_MAX_WAIT_SECONDS = 0.005


def delay_unready(runs: list[ScheduledRun]) -> tuple[list[ScheduledRun], list[ScheduledRun]]:
    """The runs without the last token of each sequence whose grammar is not compiled, or whose mask takes long and
    is not made; and these runs as they were.

    Such a sequence samples nothing, and the next step computes that token again. So it delays itself alone.
    """
    waiting = [
        (run, run.sequence.matcher)
        for run in runs
        if run.samples and run.sequence.matcher is not None and not run.sequence.prepare_mask()
    ]
    if not waiting:
        return runs, []
    matchers = [matcher for _, matcher in waiting if matcher.starts_waiting() or len(waiting) == len(runs)]
    wait([matcher.awaited for matcher in matchers], _MAX_WAIT_SECONDS)
    delayed = [run for run, _ in waiting if not run.sequence.prepare_mask()]
    ids = {run.sequence_id for run in delayed}
    shortened = [run._replace(end=run.end - 1, samples=False) if run.sequence_id in ids else run for run in runs]
    return [run for run in shortened if run.end > run.start], delayed
