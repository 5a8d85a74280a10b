"""Measures what the journal costs: scheduler, Redis, gRPC and worker are real, only the model sleeps."""

from svc_common.polling import poll_directly

poll_directly()  # as services do: this program stands for a gateway
