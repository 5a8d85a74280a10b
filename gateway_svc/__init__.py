"""The gateway: takes requests over HTTP and gRPC, and has schedulers answer them."""

from svc_common.grpc_polling import disable_event_engine

disable_event_engine()  # here, where nothing has imported grpc yet
