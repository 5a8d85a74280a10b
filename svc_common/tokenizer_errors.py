"""Errors of the packages that read tokenizer.json: they raise nothing narrower than Exception, and where they panic, as
for damaged tables of characters, a PanicException, which is none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def tokenizer_errors(refusal: Callable[[object], Exception]) -> Iterator[None]:
    """Raises `refusal` of any error of the block, also of a panic."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # a class without a public name
            raise refusal(error) from error
        raise
