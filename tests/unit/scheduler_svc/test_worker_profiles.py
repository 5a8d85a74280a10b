"""Profiles are started and stopped on all workers, and each one's answer is reported."""

from checksum_service import ChecksumService, serve
from scheduler_svc.model_versions import WorkerName
from scheduler_svc.worker_profiles import ProfileAnswer, WorkerProfiles

REFUSAL = "QUIRE_PROFILE_DIR is not set"


async def test_each_workers_answer_is_reported() -> None:
    profiled = ChecksumService()
    profiled.trace = "/traces/1"
    server, port = await serve(profiled)
    refusing, other_port = await serve(ChecksumService())
    workers = [WorkerName(f"127.0.0.1:{each}", "tiny") for each in (port, other_port)]
    profiles = WorkerProfiles()
    assert await profiles.start(workers) == [ProfileAnswer(workers[0]), ProfileAnswer(workers[1], problem=REFUSAL)]
    assert await profiles.stop(workers) == [
        ProfileAnswer(workers[0], path="/traces/1"),
        ProfileAnswer(workers[1], problem=REFUSAL),
    ]
    await server.stop(None)
    (lost, _) = await profiles.stop(workers)
    assert lost.problem
    await refusing.stop(None)
