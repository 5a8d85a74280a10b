"""InternVL 3 and 3.5 in transformers' format: the text model is that of Qwen 2, 2.5 or 3."""

from worker_svc.model.architecture import Architecture

ARCHITECTURE = Architecture.of_text_model(__file__, "InternVL")
