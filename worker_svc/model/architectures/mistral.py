"""Mistral: Llama without biases, with a window of keys in every layer or in none."""

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import describe_decoder

ARCHITECTURE = Architecture.of_decoder(__file__, "Mistral", describe_decoder)
