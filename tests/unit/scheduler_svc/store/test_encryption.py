"""Encrypted records: what is stored, what is read, keys that change, and records that are changed."""

import logging
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from redis_server import RedisServer
from request_logs import length_end, logprobs, request_log
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.base import UndecryptableRecord, WriteBatch
from scheduler_svc.store.encryption import NO_KEYS, InvalidRecordKeys, RecordKeys, record_key_file
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, ending_of, packed, put, tokens_of, write_of
from svc_common.settings import read_settings

OLD, NEW = RecordKeys({"old": b"o" * 32}), RecordKeys({"new": b"n" * 32})
BOTH = RecordKeys({**NEW.keys, **OLD.keys})
TOKENS = [70_001, 70_002, 70_003]


def store_with(server: RedisServer, keys: RecordKeys) -> RedisStore:
    return RedisStore(server.url, 500, record_keys=keys)


@pytest.fixture
async def encrypted(server: RedisServer, keys: Any) -> AsyncIterator[RedisStore]:
    """A store on an empty server."""
    store = store_with(server, OLD)
    yield store
    await store.close()


def secret_log(name: str | None = None) -> RequestLog:
    log = request_log(name, n=2)
    log.submit.tenant = "the tenant"
    log.submit.render_options.stops.append("the stop string")
    return log


async def written(store: RedisStore, log: RequestLog) -> RequestLog:
    """A record that has everything that one can have, and has been cut."""
    assert await store.put(log, EPOCH) is None
    writes = [
        write_of(log, 0, [*TOKENS[:2], 9, 9], logprobs=packed(-1, -2, -3, -4), prompt_logprobs=packed(-5, -6)),
        write_of(log, 2, TOKENS[2:], logprobs=packed(-7), truncates=True, end=length_end().SerializeToString()),
        write_of(log, 0, [5], index=1, logprobs=packed(-8), score=-0.25, end=b""),
    ]
    for write in writes:  # a repeated one changes nothing
        for _ in range(2):
            assert await store.write(WriteBatch(writes=[write]), EPOCH) == []
    return log


async def test_a_record_comes_back_as_it_was_written(encrypted: RedisStore) -> None:
    log = await written(encrypted, secret_log())
    await encrypted.write(WriteBatch(endings=[ending_of(log)]), EPOCH)
    found = await encrypted.read(log.key)
    assert found is not None
    assert (found.submit, found.state, found.key_id, found.is_durable) == (log.submit, State.FINISHED, "old", True)
    first, second = found.sequences
    assert (first.token_ids, first.logprobs, first.end) == (TOKENS, logprobs(-1, -2, -7), length_end())
    assert (second.token_ids, second.logprobs, second.score) == ([5], logprobs(-8), -0.25)
    assert second.end == scheduler_v1.SequenceEnd()
    assert found.prompt_logprobs == logprobs(-5, -6)


def everything_in(keys: Any) -> bytes:
    """All names and values in Redis."""
    parts: list[bytes] = []
    for name in keys.scan_iter():
        kind = keys.type(name)
        match kind:
            case b"hash":
                parts += [part for pair in keys.hgetall(name).items() for part in pair]
            case b"list":
                parts += keys.lrange(name, 0, -1)
            case b"set":
                parts += keys.smembers(name)
            case _:
                parts.append(keys.get(name))
        parts.append(name)
    return b"\n".join(parts)


async def test_prompt_parameters_and_output_are_not_readable_in_redis(
    encrypted: RedisStore, store: RedisStore, keys: Any
) -> None:
    prompt = scheduler_v1.Submit(prompt_token_ids=range(1000, 1032)).SerializeToString()
    plain = [prompt, b"the tenant", b"the stop string", struct.pack("<2I", *TOKENS[:2]), *packed(-1, -5, -8)]
    await written(encrypted, secret_log())
    for part in plain:
        assert part not in everything_in(keys)
    await written(store, secret_log())  # not encrypted: the parts are what is searched for
    for part in plain:
        assert part in everything_in(keys)


async def test_the_same_record_is_never_encrypted_in_the_same_way(encrypted: RedisStore, keys: Any) -> None:
    log = await put(encrypted, secret_log(), 1, 1)
    name = f"{{quire}}:request:{log.key}:tokens:0"
    first = keys.get(name)
    assert len(first) == 64
    await encrypted.write(WriteBatch(writes=[write_of(log, 0, [1, 1])]), EPOCH)
    second = keys.get(name)
    assert len({first[:32], first[32:], second[:32], second[32:]}) == 4


async def test_keys_are_rotated(server: RedisServer, encrypted: RedisStore, keys: Any) -> None:
    before = await written(encrypted, secret_log())
    rotated = store_with(server, BOTH)
    found = await rotated.read(before.key)
    assert found is not None
    assert (found.sequences[0].token_ids, found.key_id) == (TOKENS, "old")
    # It goes on under its own key, which the next leader has too.
    further = write_of(found, 3, [4], key_id=found.key_id, logprobs=packed(-9))
    assert await rotated.write(WriteBatch(writes=[further]), EPOCH) == []
    after = await put(rotated, secret_log(), 7)
    assert keys.hget(f"{{quire}}:request:{after.key}", "key_id") == b"new"
    again = store_with(server, BOTH)
    assert (await tokens_of(again, before))[0] == [*TOKENS, 4]
    assert await tokens_of(again, after) == [[7], []]
    for one in (rotated, again):
        await one.close()


async def test_a_live_request_keeps_its_key_when_keys_change(server: RedisServer, encrypted: RedisStore) -> None:
    log = request_log()
    assert await encrypted.put(log, EPOCH) is None
    together = request_log()
    await encrypted.write(WriteBatch([together], [write_of(together, 0, [1], key_id=together.key_id)]), EPOCH)
    encrypted.record_keys = NEW.with_earlier(OLD)
    for one, tokens in ((log, []), (together, [1])):
        assert one.key_id == "old"
        further = write_of(one, len(tokens), [2, 3], key_id=one.key_id)
        assert await encrypted.write(WriteBatch(writes=[further]), EPOCH) == []
        assert await tokens_of(encrypted, one) == [[*tokens, 2, 3]]
    later = await put(encrypted, secret_log(), 7)
    assert later.key_id == "new"
    fresh = store_with(server, BOTH)
    assert await tokens_of(fresh, log) == [[2, 3]]
    assert await tokens_of(fresh, later) == [[7], []]
    await fresh.close()


@pytest.mark.parametrize("is_put", [True, False])
async def test_a_request_whose_record_has_a_key_that_is_missing_is_recorded_anew(
    server: RedisServer, encrypted: RedisStore, is_put: bool
) -> None:
    """Its gateway submits it again to a leader that has only the new key."""
    first, again = secret_log("same"), secret_log("same")
    again.submit.CopyFrom(first.submit)
    assert await encrypted.put(first, EPOCH) is None
    later = store_with(server, NEW)
    if is_put:
        assert await later.put(again, EPOCH) is None
    tokens = write_of(again, 0, TOKENS, key_id="new")
    assert await later.write(WriteBatch([] if is_put else [again], [tokens]), EPOCH) == []
    assert again.key_id == "new"
    for keys in (NEW, BOTH):
        reader = store_with(server, keys)
        assert await tokens_of(reader, again) == [TOKENS, []]
        await reader.close()
    await later.close()


async def test_a_record_in_the_clear_stays_so_and_goes_on(server: RedisServer, store: RedisStore) -> None:
    log = await put(store, secret_log(), 1)
    later = store_with(server, OLD)
    found = await later.read(log.key)
    assert found is not None
    assert found.key_id == ""
    await later.write(WriteBatch(writes=[write_of(found, 1, [2], key_id=found.key_id)]), EPOCH)
    assert await tokens_of(later, log) == await tokens_of(store, log) == [[1, 2], []]
    await later.close()


async def test_a_record_in_the_clear_is_unusable_where_the_file_says_so(
    server: RedisServer, store: RedisStore, encrypted: RedisStore
) -> None:
    clear, own = await put(store, secret_log(), 1), await put(encrypted, secret_log(), 1)
    strict = store_with(server, RecordKeys(OLD.keys, reads_clear=False))
    with pytest.raises(UndecryptableRecord, match="not encrypted"):
        await strict.read(clear.key)
    assert await tokens_of(strict, own) == [[1], []]
    await strict.close()


@pytest.mark.parametrize("keys_left", [NO_KEYS, NEW], ids=["none", "another"])
async def test_a_record_without_its_key_is_unusable_and_others_are_not(
    server: RedisServer, encrypted: RedisStore, keys_left: RecordKeys, caplog: pytest.LogCaptureFixture
) -> None:
    lost = await written(encrypted, secret_log("lost"))
    other = store_with(server, keys_left)
    own = await put(other, request_log(), 1)
    with pytest.raises(UndecryptableRecord, match="key 'old', which this scheduler lacks"):
        await other.read(lost.key)
    with pytest.raises(UndecryptableRecord):
        await other.put(secret_log("lost"), EPOCH)
    with caplog.at_level(logging.ERROR, "quire.scheduler"):
        assert [log.key for log in await other.live()] == [own.key]
    assert [record.message for record in caplog.records] == ["a request is not taken over"]
    assert (await tokens_of(encrypted, lost))[0] == TOKENS
    await other.close()


@pytest.mark.parametrize(
    "part", ["submit", "token", "tokens moved", "logprobs", "prompt logprobs", "end", "score", "cut"]
)
async def test_a_changed_record_is_unusable(encrypted: RedisStore, keys: Any, part: str) -> None:
    log, other = await written(encrypted, secret_log()), await written(encrypted, secret_log())
    name, other_name = (f"{{quire}}:request:{one.key}" for one in (log, other))
    tokens = keys.get(f"{name}:tokens:0")
    match part:
        case "submit" | "end" | "score":
            field = part if part == "submit" else f"{part}:1"
            theirs = keys.hget(other_name, field)
            assert theirs is not None
            keys.hset(name, field, theirs)
        case "token":
            keys.setrange(f"{name}:tokens:0", 20, bytes([tokens[20] ^ 1]))
        case "tokens moved":
            keys.set(f"{name}:tokens:0", tokens[32:64] + tokens[:32] + tokens[64:])
        case "cut":
            keys.set(f"{name}:tokens:0", tokens + b"x" * 8)
        case "logprobs":
            keys.lset(f"{name}:logprobs:0", 0, keys.lindex(f"{name}:logprobs:0", 1))
        case _:
            keys.lset(f"{name}:prompt_logprobs", 0, b"short")
    with pytest.raises(UndecryptableRecord):
        await encrypted.read(log.key)
    assert [one.key for one in await encrypted.live()] == [other.key]


async def test_a_record_under_another_name_is_unusable(encrypted: RedisStore, keys: Any) -> None:
    log = await put(encrypted, secret_log(), 1)
    theirs = request_log().key
    keys.copy(f"{{quire}}:request:{log.key}", f"{{quire}}:request:{theirs}")
    with pytest.raises(UndecryptableRecord):
        await encrypted.read(theirs)


def test_a_file_has_keys_by_id(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nid = "b"\nkey = "{"0A" * 32}"\n[[keys]]\nid = "a"\nkey = "{"ff" * 32}"\n')
    keys = read_settings(SchedulerSettings, ["--record-keys-file", str(path)]).record_keys
    assert (keys.newest, dict(keys.keys)) == ("b", {"b": b"\n" * 32, "a": b"\xff" * 32})
    assert keys.reads_clear
    assert "0a" not in repr(keys).lower().replace("newest", "")
    path.write_text("clear_records = false\n" + path.read_text())
    strict = RecordKeys.read(path)
    assert (strict.newest, strict.reads_clear) == ("b", False)
    assert not strict.with_earlier(OLD).reads_clear
    assert read_settings(SchedulerSettings, []).record_keys is NO_KEYS


SECRET = "5ec4e7" + "0" * 58


def test_a_changed_file_adds_keys_and_does_not_change_those_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nid = "a"\nkey = "{SECRET}"')
    file = record_key_file(path)
    path.write_text(f'[[keys]]\nid = "b"\nkey = "{"ff" * 32}"')
    file.refresh()
    assert (file.current.newest, file.current.keys) == ("b", {"b": b"\xff" * 32, "a": bytes.fromhex(SECRET)})
    before = file.current
    path.write_text(f'[[keys]]\nid = "a"\nkey = "{SECRET[::-1]}"')
    file.refresh()
    assert file.current is before
    (line,) = caplog.records
    assert line.why == f"{path}: the key a is not the same as before; a new key needs a new id"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no [[keys]] table"),
        ("[[keys", "Expected"),
        ("keys = [1]", "keys[0] is not a table"),
        (f'[[keys]]\nkey = "{SECRET}"', "keys[0].id is not 1 to 64 letters"),
        (f'[[keys]]\nid = "a b"\nkey = "{SECRET}"', "keys[0].id is not 1 to 64 letters"),
        ('[[keys]]\nid = "a"', "keys[0].key is not 64 hexadecimal digits"),
        (f'[[keys]]\nid = "a"\nkey = "{SECRET[:-1]}"', "keys[0].key is not 64 hexadecimal digits"),
        (f'[[keys]]\nid = "a"\nkey = "{SECRET}"\nuse = 1', "keys[0] has the unknown field use"),
        (f'[[keys]]\nid = "a"\nkey = "{SECRET}"\n[[keys]]\nid = "a"\nkey = "{SECRET}"', "keys[1].id is there twice"),
        (f'clear = false\n[[keys]]\nid = "a"\nkey = "{SECRET}"', "there is the unknown field clear"),
        (f'clear_records = "no"\n[[keys]]\nid = "a"\nkey = "{SECRET}"', "clear_records is not true or false"),
    ],
    ids=range(11),
)
def test_a_bad_file_is_named_without_its_keys(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidRecordKeys):
        RecordKeys.read(path)
    with pytest.raises(SystemExit):
        read_settings(SchedulerSettings, ["--record-keys-file", str(path)])
    printed = capsys.readouterr().err
    assert f"QUIRE_RECORD_KEYS_FILE (--record-keys-file): {path}: {message}" in printed
    assert "5ec4e7" not in printed


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(SchedulerSettings, ["--record-keys-file", str(tmp_path / "none")])
    assert f"{tmp_path / 'none'}: No such file or directory" in capsys.readouterr().err
