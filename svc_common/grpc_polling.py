"""Which thread of a process reads gRPC's sockets."""

import os

EXPERIMENTS = "GRPC_EXPERIMENTS"
"""The environment variable of gRPC's experiments; a minus disables one."""
NO_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"


def disable_event_engine() -> None:
    """Makes the thread that waits for gRPC's events read the sockets itself. To be called before grpc is imported.

    Since 1.80 grpcio has an event engine, whose threads read the sockets and then wake the waiting one: one more
    wake-up for each message, and much of its time (`make bench-steps` measures it). gRPC has no other switch than its
    experiments; a version without them logs a line. A value that is set already stays.
    """
    os.environ.setdefault(EXPERIMENTS, NO_EVENT_ENGINE)
