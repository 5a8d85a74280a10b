"""Which thread of a process reads gRPC's sockets."""

import os

EXPERIMENTS = "GRPC_EXPERIMENTS"
"""The environment's variable in which gRPC is told of what it is to try, or with a minus not to."""
NO_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"


def disable_event_engine() -> None:
    """Have the thread that waits for gRPC's events read the sockets itself. To be called before grpc is imported.

    Since 1.80 grpcio has an event engine, whose threads read the sockets and then wake the one that waits: a wake-up
    more for each message, and much of its time (`make bench-steps` tells how much). Its experiments are the switch
    that gRPC has for this; one that no longer knows them says so in a line and goes on. Whoever sets the variable is
    obeyed.
    """
    os.environ.setdefault(EXPERIMENTS, NO_EVENT_ENGINE)
