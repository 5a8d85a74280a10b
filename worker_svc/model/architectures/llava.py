"""LLaVA 1.5, and models with the same model_type: the text model may be any."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "Llava")
