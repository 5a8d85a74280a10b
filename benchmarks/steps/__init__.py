"""What a step costs beside the forward pass: scheduler, gRPC and worker are real, only the model sleeps."""
