"""Idefics 3: the text model is that of Llama 3."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "Idefics3")
