"""Why a worker cannot start."""


class CannotServe(Exception):  # noqa: N818
    """The worker cannot serve what it was told to. The text is for the operator, and says what would do."""
