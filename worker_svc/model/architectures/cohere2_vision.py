"""Command A Vision: the text model is that of Command A."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "Cohere2Vision")
