"""What vLLM calls checkpoints of ModelOpt of this kind: those of the format `modelopt`."""

from worker_svc.model.formats.modelopt import FORMAT

__all__ = ["FORMAT"]
