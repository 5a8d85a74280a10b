"""Encryption of records at rest: AES-256-GCM, under a key of the record's own that is derived from one of a file."""

import hmac
import os
import re
import struct
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from scheduler_svc.store.base import UndecryptableRecord
from svc_common.files import ReloadedFile

_NONCE = 12  # bytes, before the ciphertext
_TAG = 16  # bytes, after it
TOKEN_SIZE = _NONCE + 4 + _TAG
"""Bytes of an encrypted token. Each is encrypted by itself, so that tokens are appended and cut off as clear ones."""

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_TOKEN = struct.Struct("<I")


class InvalidRecordKeys(ValueError):  # noqa: N818
    """A file of keys that cannot be used. The text is for the operator, and holds no key."""


@dataclass(frozen=True, slots=True)
class RecordKeys:
    """Keys by their ids. Records are encrypted with the first one; without any they are not encrypted."""

    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    reads_clear: bool = True
    """Whether records that are not encrypted are read: who can write to the store could put one in place of another."""

    @classmethod
    def read(cls, path: Path) -> "RecordKeys":
        """Reads `[[keys]]` tables of a TOML file: `id`, and `key` as 64 hexadecimal digits; and `clear_records`.

        Raises InvalidRecordKeys.
        """
        try:
            content = tomllib.loads(path.read_text())
        except OSError as error:
            raise InvalidRecordKeys(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise InvalidRecordKeys(f"{path}: {error}") from None
        if unknown := sorted(set(content) - {"keys", "clear_records"}):
            raise InvalidRecordKeys(f"{path}: there is the unknown field {unknown[0]}")
        entries, reads_clear = content.get("keys"), content.get("clear_records", True)
        if not isinstance(reads_clear, bool):
            raise InvalidRecordKeys(f"{path}: clear_records is not true or false")
        if not isinstance(entries, list) or not entries:
            raise InvalidRecordKeys(f"{path}: there is no [[keys]] table")
        keys: dict[str, bytes] = {}
        for index, entry in enumerate(entries):
            where = f"{path}: keys[{index}]"
            name, key = _check_entry(where, entry)
            if name in keys:
                raise InvalidRecordKeys(f"{where}.id is there twice")
            keys[name] = key
        return cls(keys, reads_clear)

    def with_earlier(self, earlier: "RecordKeys") -> "RecordKeys":
        """These keys, and earlier ones that they leave out: live requests are written with them until they end.

        Raises InvalidRecordKeys where an id has got another key.
        """
        for name, key in earlier.keys.items():
            if self.keys.get(name, key) != key:
                raise InvalidRecordKeys(f"the key {name} is not the same as before; a new key needs a new id")
        return RecordKeys({**self.keys, **earlier.keys}, self.reads_clear)

    @property
    def newest(self) -> str:
        """The id of the key for new records; empty: they are not encrypted."""
        return next(iter(self.keys), "")

    def cipher(self, key_id: str, key: str, submission_id: str) -> "RecordCipher":
        """The cipher of a record, by its key in the store. Raises UndecryptableRecord where there is no such key."""
        if key_id not in self.keys:
            raise UndecryptableRecord(f"a record that is encrypted with the key {key_id!r}, which this scheduler lacks")
        # A submission's id is random: no two records have a key in common, and random nonces do not repeat under one.
        derived = hmac.digest(self.keys[key_id], b"quire record\0" + submission_id.encode(), "sha256")
        return RecordCipher(AESGCM(derived), f"{key}\0{submission_id}\0")


NO_KEYS = RecordKeys()


def record_key_file(path: Path) -> ReloadedFile[RecordKeys]:
    """The keys of a file, and those that it had before. Raises InvalidRecordKeys."""

    def read(path: Path, before: RecordKeys | None) -> RecordKeys:
        keys = RecordKeys.read(path)
        try:
            return keys if before is None else keys.with_earlier(before)
        except InvalidRecordKeys as error:
            raise InvalidRecordKeys(f"{path}: {error}") from None

    return ReloadedFile(path, "record keys", read, InvalidRecordKeys)


class RecordCipher:
    """Encrypts and decrypts parts of one record. A part is bound to its record and to its place there."""

    def __init__(self, cipher: AESGCM, record: str) -> None:
        self._cipher = cipher
        self._record = record

    def encrypt(self, place: str, data: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, data, (self._record + place).encode())

    def decrypt(self, place: str, data: bytes) -> bytes:
        """Raises UndecryptableRecord."""
        try:
            return self._cipher.decrypt(data[:_NONCE], data[_NONCE:], (self._record + place).encode())
        except (InvalidTag, ValueError):  # ValueError: it is too short
            raise UndecryptableRecord(f"a record that cannot be decrypted: its {place} was changed") from None

    def encrypt_tokens(self, index: int, offset: int, token_ids: Iterable[int]) -> bytes:
        """Tokens of a sequence from position `offset` on, each in `TOKEN_SIZE` bytes."""
        return b"".join(
            self.encrypt(f"token {index}:{position}", _TOKEN.pack(token_id))
            for position, token_id in enumerate(token_ids, offset)
        )

    def decrypt_tokens(self, index: int, packed: bytes) -> list[int]:
        """All tokens of a sequence. Raises UndecryptableRecord."""
        parts = [packed[start : start + TOKEN_SIZE] for start in range(0, len(packed), TOKEN_SIZE)]
        return [
            _TOKEN.unpack(self.decrypt(f"token {index}:{position}", part))[0] for position, part in enumerate(parts)
        ]

    def encrypt_each(self, place: str, offset: int, parts: Sequence[bytes]) -> list[bytes]:
        """Items of a list from `offset` on."""
        return [self.encrypt(f"{place}:{position}", part) for position, part in enumerate(parts, offset)]

    def decrypt_each(self, place: str, parts: Sequence[bytes]) -> list[bytes]:
        """All items of a list. Raises UndecryptableRecord."""
        return [self.decrypt(f"{place}:{position}", part) for position, part in enumerate(parts)]


def _check_entry(where: str, entry: Any) -> tuple[str, bytes]:
    if not isinstance(entry, dict):
        raise InvalidRecordKeys(f"{where} is not a table")
    if unknown := sorted(set(entry) - {"id", "key"}):
        raise InvalidRecordKeys(f"{where} has the unknown field {unknown[0]}")
    name, key = entry.get("id"), entry.get("key")
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise InvalidRecordKeys(f"{where}.id is not 1 to 64 letters, digits, '.', '_' or '-'")
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise InvalidRecordKeys(f"{where}.key is not 64 hexadecimal digits")
    return name, bytes.fromhex(key)
