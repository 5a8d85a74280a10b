"""What a step costs beside the forward pass: scheduler, gRPC and worker are real, only the model sleeps."""

from svc_common.grpc_polling import disable_event_engine

disable_event_engine()  # as services do: here are programs that stand for one
