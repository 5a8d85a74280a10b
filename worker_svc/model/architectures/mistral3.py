"""Mistral Small 3.1 and 3.2, and Ministral 3: their text models are `mistral` and `ministral3`."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "Mistral3")
