"""What a step costs beside the forward pass: scheduler, gRPC and worker are real, only the model sleeps."""

from svc_common.polling import poll_directly

poll_directly()  # as services do: here are programs that stand for one
