"""The programs in client/examples, built and run against a gateway."""

import asyncio
from pathlib import Path

import pytest

from example_programs import EXAMPLES, LANGUAGES
from gateway_harness import Harness, encoded
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import Script, ScriptedScheduler, ScriptedSession, answer_with, length_end

SECONDS = 600
ANSWER = encoded("hello world")


def answering(scheduler: ScriptedScheduler) -> Script:
    """The whole answer; to a request that may be resumed, its first token, and the rest to the call that resumes it."""

    def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        if not submit.detachable:
            answer_with(ANSWER)(session, submit)
            return
        whole = scheduler_v1.Tokens(token_ids=ANSWER, end=length_end())
        scheduler.attach_script = lambda session, attach: session.attached(submit, whole)
        session.accept(submit.key)
        session.tokens(submit.key, ANSWER[:1], 0)

    return script


@pytest.mark.parametrize("language", LANGUAGES)
async def test_an_example_does_what_it_shows(language: str, quire: Harness, tmp_path: Path) -> None:
    quire.scheduler.script = answering(quire.scheduler)
    address = f"127.0.0.1:{quire.gateway.grpc_port}"
    command = await asyncio.to_thread(LANGUAGES[language], address, tmp_path)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(SECONDS):
        out, err = await process.communicate()
    assert out.decode().splitlines() == [
        "generated: hello world",
        "streamed: hello world",
        "error: INVALID_ARGUMENT INVALID_FIELD generation.sampling.temperature",
        "resumed: hello| world",
    ], err.decode()
    assert process.returncode == 0


def test_every_example_is_run() -> None:
    assert {folder.name for folder in EXAMPLES.iterdir() if folder.is_dir()} == set(LANGUAGES)
