"""Gemma 4 12B with images and sound: the text model is that without them."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "Gemma4Unified", has_soft_cap=True)
