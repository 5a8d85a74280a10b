"""Copies of a request's log."""

from request_logs import end, length_end, logprobs, request_log


def test_a_snapshot_stays_as_the_log_was() -> None:
    log = request_log(n=2)
    log.sequences[1].token_ids.append(7)
    log.sequences[1].logprobs += logprobs(-0.5)
    copy = log.snapshot()
    log.sequences[1].token_ids.append(8)
    log.sequences[1].logprobs += logprobs(-0.25)
    log.prompt_logprobs += logprobs(-1.0)
    end(log)
    assert [one.token_ids for one in copy.sequences] == [[], [7]]
    assert [one.logprobs for one in copy.sequences] == [[], logprobs(-0.5)]
    assert (len(copy.prompt_logprobs), len(log.prompt_logprobs)) == (0, 1)
    assert [one.end for one in copy.sequences] == [None, None]
    assert (copy.is_over, copy.key, copy.submit) == (False, log.key, log.submit)
    assert log.sequences[1].end == length_end()
