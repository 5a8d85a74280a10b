"""The gateway: takes requests over HTTP and gRPC, and has schedulers answer them."""

from svc_common.polling import poll_directly

poll_directly()  # here, where nothing has imported grpc yet
