"""LLaVA-NeXT (1.6), Granite Vision: the text model may be any."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "LlavaNext")
