"""The scheduler: plans the steps of workers, and owns their blocks and every request."""

from svc_common.polling import poll_directly

poll_directly()  # here, where nothing has imported grpc yet
