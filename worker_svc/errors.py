"""Why a worker cannot start, or go on."""


class StartupFailed(Exception):  # noqa: N818
    """The worker cannot serve what it was told to. The text is for the operator, and says what would do."""


class DeviceLost(Exception):  # noqa: N818
    """The device takes no more work from this process; only another process may get it back."""
