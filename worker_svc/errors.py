"""Why a worker cannot start or continue."""


class StartupFailed(Exception):  # noqa: N818
    """The worker cannot serve with its settings. The text is for the operator and says what is possible."""


class UnsupportedModel(StartupFailed):
    """A model that cannot be served. The text is for the operator and says what can."""


class DeviceLost(Exception):  # noqa: N818
    """The device accepts no more work from this process. Another process may use it again."""


class RestartOrdered(Exception):  # noqa: N818
    """The scheduler that leads cannot use this process, and has ordered it to end."""
