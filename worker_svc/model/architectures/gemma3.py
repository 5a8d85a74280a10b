"""Gemma 3 with images (4B, 12B and 27B): the text model is Gemma 3 without images."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "Gemma3")
