"""Measures what the journal costs: scheduler, Redis, gRPC and worker are real, only the model sleeps."""

from svc_common.grpc_polling import disable_event_engine

disable_event_engine()  # as services do: this program stands for a gateway
