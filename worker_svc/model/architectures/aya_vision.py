"""Aya Vision: the text model is that of Command-R7B."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "AyaVision")
