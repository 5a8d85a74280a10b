"""A real Redis of the test's own: the embedded one, in a directory of its own."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from svc_common.supervisor.addresses import free_port
from svc_common.supervisor.embedded_redis import EmbeddedRedis


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Start a server and yield its URL once it answers."""
    embedded = EmbeddedRedis.prepare(directory, free_port())
    process = subprocess.Popen(embedded.command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis.from_url(embedded.url) as store:
            for _ in range(500):
                try:
                    store.ping()
                    break
                except redis.exceptions.ConnectionError:
                    time.sleep(0.01)
            else:
                raise AssertionError("redis does not answer")
        yield embedded.url
    finally:
        process.terminate()
        process.wait()
