"""After random changes of logs and faults of the store, the store has the contents of the logs."""

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from journals import contents, fail_over
from redis_server import RedisServer, running_server
from request_logs import end, length_end, logprobs, request_log
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.journal import Journal
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.spending import Spending
from scheduler_svc.store.redis import RedisStore

EPOCH = 100
PROMPT = 9  # log-probabilities of a prompt, which come before tokens


class Logs:
    """Requests that a scheduler has, at random."""

    def __init__(self, journal: Journal, rng: random.Random) -> None:
        self.all: list[RequestLog] = []
        self._journal = journal
        self._rng = rng
        self._num_tokens = 0

    def change(self) -> None:
        """One step, or what else happens to one request."""
        running = [log for log in self.all if not log.is_over]
        if len(running) < 4:
            self.all.append(request_log(n=self._rng.randint(1, 3)))
            running = [self.all[-1]]
        log = self._rng.choice(running)
        index = self._rng.randrange(len(log.sequences))
        sequence = log.sequences[index]
        match self._rng.choices(["step", "cut", "end", "over"], [20, 2, 1, 1])[0]:
            case "step":
                for one in running:
                    self._grow(one)
            case "cut" if sequence.token_ids:
                length = self._rng.randrange(len(sequence.token_ids))
                del sequence.token_ids[length:], sequence.logprobs[length:]
                sequence.end = self._rng.choice([None, length_end()])
                self._journal.truncate(log, index)
            case "end":
                sequence.end = length_end()
            case "over":
                end(log, self._rng.choice([State.FINISHED, State.FAILED]))
        self._journal.mark_changed(log)

    def _grow(self, log: RequestLog) -> None:
        if len(log.sequences) == 1 and len(log.prompt_logprobs) < PROMPT:
            log.prompt_logprobs += logprobs(*range(len(log.prompt_logprobs), len(log.prompt_logprobs) + 3))
            self._journal.mark_changed(log)
            return
        for sequence in log.sequences:
            if sequence.end is None:
                self._num_tokens += 1  # another one each time, so that tokens from before a cut are seen
                sequence.token_ids.append(self._num_tokens)
                if len(log.sequences) == 2:
                    sequence.logprobs += logprobs(-self._num_tokens)
        self._journal.mark_changed(log)


def disturb(keys: "redis.Redis", server: RedisServer, rng: random.Random, earlier: dict[bytes, bytes]) -> None:
    """A random fault of the store, which had the `earlier` contents a moment ago."""
    match rng.randrange(6):
        case 0:
            keys.client_kill_filter(_type="normal", skipme=True)
        case 1:  # it died and kept nothing
            keys.flushall()
        case 2:  # it died and lost its latest writes
            for name in keys.scan_iter("*:tokens:*"):
                if rng.random() < 0.5:
                    keys.set(name, keys.getrange(name, 0, 7), ex=500)
            for name in keys.scan_iter("*:prompt_logprobs"):
                if rng.random() < 0.5:
                    keys.ltrim(name, 0, 1)
        case 3:
            for name in keys.scan_iter("{quire}:request:*"):
                if rng.random() < 0.3:
                    keys.delete(name)
        case 4:
            server.kill()
            server.start()
        case 5:  # its primary died, and its replica lacks the latest writes
            fail_over(keys, earlier)
    keys.script_flush()  # like a restarted server


@pytest.mark.parametrize("seed", range(4))
async def test_in_the_end_the_store_has_what_the_logs_have(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    with running_server(tmp_path) as server, redis.Redis.from_url(server.url) as keys:
        store = RedisStore(server.url, 500)
        journal = Journal(store, EPOCH, lambda: None, lambda log, index: None, Spending(Budgets()))
        logs, earlier = Logs(journal, rng), contents(keys)
        task = asyncio.create_task(journal.run())
        try:
            for number in range(400):
                logs.change()
                if number % 40 == 19:
                    earlier = contents(keys)
                if number % 40 == 39:
                    disturb(keys, server, rng, earlier)
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
            logs.change()  # the next call to the store finds that it was disturbed
            async with asyncio.timeout(60):
                while not await journal.flush(1):
                    pass
            assert all(log.is_durable for log in logs.all)
            assert not task.done()
            for log in logs.all:
                found = await store.read(log.key)
                assert found is not None
                assert found.state is log.state
                assert [one.token_ids for one in found.sequences] == [one.token_ids for one in log.sequences]
                assert [one.logprobs for one in found.sequences] == [one.logprobs for one in log.sequences]
                assert [one.end for one in found.sequences] == [one.end for one in log.sequences]
                assert found.prompt_logprobs == log.prompt_logprobs
            assert {log.key for log in await store.live()} == {log.key for log in logs.all if not log.is_over}
            assert all(keys.ttl(name) > 0 for name in keys.scan_iter())
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await store.close()
