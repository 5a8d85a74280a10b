"""Converts logs and writes to and from the arguments and replies of the script."""

import hashlib
import json
import math
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from google.protobuf.message import DecodeError

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.request_log import RecordState, RequestLog, SequenceLog, State
from scheduler_svc.store.base import (
    BucketCall,
    BucketKind,
    Ending,
    Gap,
    IncompleteRecord,
    KeyTaken,
    MalformedRecord,
    UndecryptableRecord,
    UnsupportedRecord,
    Write,
    WriteBatch,
)
from scheduler_svc.store.client import Argument
from scheduler_svc.store.encryption import TOKEN_SIZE, RecordCipher, RecordKeys
from svc_common.protocols import RECORD_VERSIONS

Page = tuple[Sequence[bytes], bytes, Sequence[int | bytes], int, int]
"""A page of a record, as the script's `read` returns it: alternating names and values of fields, the record's key,
alternating numbers of parts and bytes of them, and where the next page begins."""
_LAST_PAGE, _UNREADABLE = -1, -2  # where there is no next page
_Record = tuple[Sequence[bytes], Sequence[Sequence[bytes]], Sequence[bytes]]
"""Each sequence's tokens and log-probabilities, and log-probabilities of the prompt."""

_NONE = 0xFFFFFFFF
_ENCRYPTED_VERSION = 3
_HEADER = struct.Struct("<BBHHIIIIIBBIII")  # of one write; the script has the same format
_LENGTH = struct.Struct("<I")
_SCORE = struct.Struct("<d")
_CLEAR_TOKEN_SIZE = 4  # bytes


def pack_record(log: RequestLog, keys: RecordKeys) -> list[Argument]:
    """The nine arguments of a record."""
    submit = log.submit
    packed, key_id = submit.SerializeToString(), keys.newest if log.key_id is None else log.key_id
    if key_id:
        packed = keys.cipher(key_id, log.key, submit.submission_id).encrypt("submission", packed)
    deadline = "" if log.deadline is None else repr(log.deadline)
    return [
        log.key,
        submit.submission_id,
        packed,
        repr(log.accepted_at),
        deadline,
        max(_num_sequences(submit), len(log.sequences)),
        log.fingerprint,
        _ENCRYPTED_VERSION if key_id else _version(submit),
        key_id,
    ]


def pack_ending(ending: Ending, ttl: int, withdrawn_ttl: int) -> list[Argument]:
    """The seven arguments of an ending; `ttl`, and `withdrawn_ttl` of what is withdrawn, are in seconds."""
    failure = "" if ending.failure is None else int(ending.failure)
    refused = withdrawn_ttl if ending.is_withdrawn else 0
    return [ending.key, ending.submission_id, ending.state.value, repr(ending.at), failure, ttl, refused]


def pack_spending(batch: WriteBatch) -> str:
    """What prompts cost, and what accounts have spent, as JSON; empty where there is nothing."""
    if not batch.prompt_charges and not batch.spending:
        return ""
    charges = [(one.key, one.submission_id, one.num_tokens) for one in batch.prompt_charges]
    spending = [(bucket_name(BucketKind.TOKENS, one.account), one.term, one.num_tokens) for one in batch.spending]
    return json.dumps({"charges": charges, "spending": spending})


def pack_bucket_call(call: BucketCall) -> list[Argument]:
    """The eight arguments of a call for a bucket."""
    name = bucket_name(call.kind, call.account)
    return [name, call.term, call.number, call.per_minute, call.most, call.least, call.returned, call.spent]


def bucket_name(kind: BucketKind, account: str) -> str:
    """What the key of an account's bucket ends with. The account is hashed: no text of a key file becomes a key."""
    return f"{kind.value}:{hashlib.sha256(account.encode()).hexdigest()}"


def pack_writes(writes: Sequence[Write], keys: RecordKeys) -> bytes:
    """All writes of a batch as one argument: sending one for each takes longer than packing them."""
    parts: list[bytes] = []
    for write in writes:
        key, submission = write.key.encode(), write.submission_id.encode()
        score = b"" if write.score is None else _SCORE.pack(write.score)
        key_id = keys.newest if write.key_id is None else write.key_id
        if key_id:
            write, tokens, score = _encrypted(write, score, keys.cipher(key_id, write.key, write.submission_id))
        else:
            tokens = struct.pack(f"<{len(write.token_ids)}I", *write.token_ids)
        parts += (
            _HEADER.pack(
                write.truncates,
                TOKEN_SIZE if key_id else _CLEAR_TOKEN_SIZE,
                len(key),
                len(submission),
                write.index,
                write.offset,
                len(tokens),
                _NONE if write.logprobs is None else len(write.logprobs),
                _NONE if write.cached_tokens is None else write.cached_tokens,
                len(score),
                len(write.fingerprint),
                _NONE if write.end is None else len(write.end),
                write.prompt_offset,
                len(write.prompt_logprobs),
            ),
            key,
            submission,
            tokens,
            score,
            write.fingerprint,
            write.end or b"",
        )
        for one in (*(write.logprobs or ()), *write.prompt_logprobs):
            parts += (_LENGTH.pack(len(one)), one)
    return b"".join(parts)


def _encrypted(write: Write, score: bytes, cipher: RecordCipher) -> tuple[Write, bytes, bytes]:
    """A write with encrypted parts, its encrypted tokens, and its encrypted score."""
    index, offset = write.index, write.offset
    tokens = cipher.encrypt_tokens(index, offset, write.token_ids)
    logprobs = None if write.logprobs is None else cipher.encrypt_each(f"logprobs {index}", offset, write.logprobs)
    end = None if write.end is None else cipher.encrypt(f"end {index}", write.end)
    prompt_logprobs = cipher.encrypt_each("prompt logprobs", write.prompt_offset, write.prompt_logprobs)
    encrypted = replace(write, logprobs=logprobs, end=end, prompt_logprobs=prompt_logprobs)
    return encrypted, tokens, cipher.encrypt(f"score {index}", score) if score else b""


def _decrypted(
    record: _Record, fields: Mapping[str, bytes], key: str, keys: RecordKeys
) -> tuple[Mapping[str, bytes], _Record]:
    """The fields and the rest of a record in the clear. Raises UndecryptableRecord."""
    all_tokens, all_logprobs, prompt_logprobs = record
    cipher = keys.cipher(fields["key_id"].decode(), key, fields["submission_id"].decode())
    clear = {**fields, "submit": cipher.decrypt("submission", fields["submit"])}
    for name, data in fields.items():
        kind, _, index = name.partition(":")
        if kind in ("end", "score"):
            clear[name] = cipher.decrypt(f"{kind} {index}", data)
    tokens = [
        struct.pack(f"<{len(packed) // TOKEN_SIZE}I", *cipher.decrypt_tokens(index, packed))
        for index, packed in enumerate(all_tokens)
    ]
    logprobs = [cipher.decrypt_each(f"logprobs {index}", parts) for index, parts in enumerate(all_logprobs)]
    return clear, (tokens, logprobs, cipher.decrypt_each("prompt logprobs", prompt_logprobs))


def unpack_written(reply: tuple[Sequence[int], Sequence[bytes]]) -> list[Gap | KeyTaken]:
    """From alternating indices and counts of gaps, with -1 for no record, and alternating keys and submissions."""
    counts, names = reply
    gaps = [
        Gap(index, None if num_tokens < 0 else num_tokens)
        for index, num_tokens in zip(counts[::2], counts[1::2], strict=True)
    ]
    taken = [KeyTaken(key.decode(), by.decode()) for key, by in zip(names[::2], names[1::2], strict=True)]
    return [*gaps, *taken]


class RecordPages:
    """A record whose pages arrive one after the other."""

    def __init__(self, first: Page) -> None:
        self.key = first[1]
        self.has_changed = False
        """Whether the record was written or replaced between two pages, so that they may not fit together."""
        self.num_bytes = 0
        """Of tokens and log-probabilities."""
        self.fields: Sequence[bytes] = first[0]
        """Alternating names and values; empty where the record cannot be read."""
        self._parts = defaultdict[int, list[bytes]](list)
        self._next = (0, 0)
        self.add(first)

    @property
    def next(self) -> tuple[int, int] | None:
        """Where the next page begins: a part, and a place in it. None: there is none."""
        return None if self._next[0] < 0 else self._next

    def add(self, page: Page) -> None:
        """The page that begins at `next`."""
        fields, _, parts, *following = page
        for part, packed in zip(parts[::2], parts[1::2], strict=True):
            self._parts[cast(int, part)].append(cast(bytes, packed))
            self.num_bytes += len(cast(bytes, packed))
        self._next = (following[0], following[1])
        if following[0] == _UNREADABLE:
            self.fields = []
        elif following[0] == _LAST_PAGE:
            self.has_changed = _pairs(fields) != _pairs(self.fields)  # each write changes a count

    def part(self, number: int) -> bytes:
        """A whole part: 0 has the log-probabilities of the prompt, 2i + 1 the tokens of sequence i, and 2i + 2 its
        log-probabilities. Each log-probability follows its length.
        """
        return b"".join(self._parts[number])

    @property
    def num_sequences(self) -> int:
        return max(self._parts, default=0) // 2


def _pairs(fields: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(fields[::2], fields[1::2], strict=True))


def unpack_log(pages: RecordPages, keys: RecordKeys) -> RequestLog:
    """A record with its sequences, all of them durable. Raises UnusableRecord."""
    try:
        return _unpack_log(pages, keys)
    except (KeyError, ValueError, struct.error, DecodeError) as error:
        raise MalformedRecord(f"a record that is malformed ({type(error).__name__})") from error


def _unpack_log(pages: RecordPages, keys: RecordKeys) -> RequestLog:
    """The same. A record that is malformed raises other exceptions, too."""
    key, indices = pages.key, range(pages.num_sequences)
    fields: Mapping[str, bytes] = {name.decode(): value for name, value in _pairs(pages.fields).items()}
    version = int(fields.get("version", 1))
    if version not in RECORD_VERSIONS:
        raise UnsupportedRecord(f"a record of version {version}, and this scheduler reads {RECORD_VERSIONS}")
    record: _Record = (
        [pages.part(2 * index + 1) for index in indices],
        [_unpack_list(pages.part(2 * index + 2)) for index in indices],
        _unpack_list(pages.part(0)),
    )
    if "key_id" in fields:
        fields, record = _decrypted(record, fields, key.decode(), keys)
    elif not keys.reads_clear:
        raise UndecryptableRecord("a record that is not encrypted, where clear_records is false")
    all_tokens, all_logprobs, prompt_logprobs = record
    _check_counts(fields, all_tokens, all_logprobs, prompt_logprobs)
    submit = scheduler_v1.Submit.FromString(fields["submit"])
    if (submit.key, submit.submission_id) != (key.decode(), fields["submission_id"].decode()):
        raise MalformedRecord("a record of another request")
    state = State(fields["state"].decode())
    sequences = [
        _unpack_sequence(fields, index, packed, logprobs)
        for index, (packed, logprobs) in enumerate(zip(all_tokens, all_logprobs, strict=True))
    ]
    return RequestLog(
        submit,
        _time(fields["accepted_at"]),
        _time(fields["deadline"]) if "deadline" in fields else None,
        state,
        _time(fields["ended_at"]) if "ended_at" in fields else None,
        sequences,
        prompt_logprobs=[worker_v1.TokenLogprobs.FromString(one) for one in prompt_logprobs],
        num_prompt_logprobs_durable=len(prompt_logprobs),
        record=RecordState.RECORDED if state is State.ACCEPTED else RecordState.COMPLETE,
        failure=cast(scheduler_v1.FailureReason, int(fields["failure"])) if "failure" in fields else None,
        fingerprint=fields.get("fingerprint", b""),
        key_id=fields.get("key_id", b"").decode(),
        prompt_cost=int(fields.get("prompt_cost", 0)),
        is_prompt_cost_durable=True,
    )


def _time(text: bytes) -> float:
    """Seconds since 1970. Raises ValueError."""
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError("not finite")
    return seconds


def _unpack_list(packed: bytes) -> list[bytes]:
    """Items that each follow their length."""
    items, at = [], 0
    while at < len(packed):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(packed, at)[0]
        items.append(packed[start:at])
    return items


def _check_counts(
    fields: Mapping[str, bytes],
    all_tokens: Sequence[bytes],
    all_logprobs: Sequence[Sequence[bytes]],
    prompt_logprobs: Sequence[bytes],
) -> None:
    """Raises IncompleteRecord where there is less than was written. Records of earlier releases have no counts."""
    if int(fields["count"]) != len(all_tokens):
        raise ValueError("the count is not one of sequences")
    counts = {"num_prompt_logprobs": len(prompt_logprobs)}
    for index, (packed, logprobs) in enumerate(zip(all_tokens, all_logprobs, strict=True)):
        counts |= {f"num_tokens:{index}": len(packed) // 4, f"num_logprobs:{index}": len(logprobs)}
    for name, count in counts.items():
        written = int(fields.get(name, 0))
        if count < written:
            raise IncompleteRecord(f"a record that lost a part of its output: {name} is {count}, and was {written}")


def _unpack_sequence(fields: Mapping[str, bytes], index: int, packed: bytes, logprobs: Sequence[bytes]) -> SequenceLog:
    num_tokens = len(packed) // 4
    end, score = fields.get(f"end:{index}"), fields.get(f"score:{index}")
    return SequenceLog(
        [*struct.unpack(f"<{num_tokens}I", packed)],
        [worker_v1.TokenLogprobs.FromString(one) for one in logprobs],
        None if end is None else scheduler_v1.SequenceEnd.FromString(end),
        int(fields.get(f"cached:{index}", 0)),
        None if score is None else _SCORE.unpack(score)[0],
        num_tokens,
        end is not None,
    )


def _version(submit: scheduler_v1.Submit) -> int:
    """The oldest version that can express the record, so that earlier releases read as many records as possible."""
    return 2 if submit.HasField("result") else 1


def _num_sequences(submit: scheduler_v1.Submit) -> int:
    """How many sequences are recorded as they grow: none of a beam search."""
    return 0 if submit.HasField("beam_search") else submit.n
