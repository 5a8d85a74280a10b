"""Errors of a model in the process of a program, and of the parts of a server as a client raises them."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire_client.errors import QuireError
from svc_common.errors import QuireError as ServedError


class LoadError(ValueError):
    """A model that cannot be served here with these arguments. The text names them, and says what is possible."""


def client_error(error: ServedError) -> QuireError:
    """The error that a client of a server raises about this one."""
    made = QuireError(
        error.code, error.reason.value, error.message, error.field, retry_after=error.retry_after, is_answer=True
    )
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made


@contextmanager
def noting_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """Adds to errors about a field, or about a type, within which prompt of a call they are about."""
    try:
        yield
    except ServedError as error:
        if error.field is not None:
            error.add_note(f"prompt {index} of {num_prompts}")
        raise
    except TypeError as error:
        if num_prompts > 1:
            error.add_note(f"prompt {index} of {num_prompts}")
        raise


@contextmanager
def client_errors() -> Iterator[None]:
    """Turns errors of a server's parts within into those of clients."""
    try:
        yield
    except ServedError as error:
        raise client_error(error) from None
