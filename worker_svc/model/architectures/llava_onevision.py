"""LLaVA-OneVision: the text model is that of Qwen 2."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "LlavaOnevision")
