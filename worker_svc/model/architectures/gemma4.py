"""Gemma 4 with images and sound: the text model is Gemma 4 without them."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "Gemma4", has_soft_cap=True)
