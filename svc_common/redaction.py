"""Removes credentials from text that is logged or printed."""

import re

_USER_INFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s\"']*@")
_PASSWORD = re.compile(r"([?&][A-Za-z_]*password=)[^&\s\"']+")


def redact(text: str) -> str:
    """The text with `***` for the user and password of each URL, and for passwords among its parameters.

    All up to the last `@` of a word is replaced: in a URL with an error, it may be part of the password.
    """
    if "://" not in text:
        return text
    return _PASSWORD.sub(r"\1***", _USER_INFO.sub(r"\1***@", text))
