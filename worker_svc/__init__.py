"""The worker: computes the steps that it is sent, in blocks that it is told."""

from svc_common.grpc_polling import disable_event_engine

disable_event_engine()  # here, where nothing has imported grpc yet
