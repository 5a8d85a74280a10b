"""Credentials in text that is logged or printed."""

import pytest

from svc_common.redaction import redact


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, a@b.c", "plain, a@b.c"),
        ("at http://h:1/a?b=c", "at http://h:1/a?b=c"),
        ("redis://:s3cr3t@h:1/0", "redis://***@h:1/0"),
        ("rediss://me:s3@cr/3t#@h, then", "rediss://***@h, then"),
        ("not 'redis://:s3cr3t@h' but 'http://h'", "not 'redis://***@h' but 'http://h'"),
        ("redis://h/0?password=s3cr3t&ssl_password=s3cr3t&db=1", "redis://h/0?password=***&ssl_password=***&db=1"),
    ],
)
def test_credentials_of_urls_are_replaced(text: str, expected: str) -> None:
    assert redact(text) == expected
