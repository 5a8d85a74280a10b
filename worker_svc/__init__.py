"""The worker: computes the steps that it is sent, in blocks that it is told."""

from svc_common.polling import poll_directly

poll_directly()  # here, where nothing has imported grpc yet
