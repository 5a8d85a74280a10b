"""The scheduler: plans the steps of workers, and owns their blocks and every request."""

from svc_common.grpc_polling import disable_event_engine

disable_event_engine()  # here, where nothing has imported grpc yet
