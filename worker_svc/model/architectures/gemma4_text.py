"""Gemma 4 without images and sound."""

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_gemma4 import describe_gemma4

ARCHITECTURE = Architecture.of_decoder(
    __file__, "Gemma4Text", describe_gemma4, generating_class="Gemma4ForCausalLM", classifies=False
)
