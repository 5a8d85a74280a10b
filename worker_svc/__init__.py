"""The worker: computes the steps that a scheduler sends, in the KV blocks that these name."""

from svc_common.grpc_polling import disable_event_engine

disable_event_engine()  # here, where nothing has imported grpc yet
