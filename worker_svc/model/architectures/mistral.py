"""Mistral: Llama without biases, with a window of keys in every layer or in none."""

from functools import partial

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder

ARCHITECTURE = Architecture.of_decoder(__file__, "Mistral", partial(describe_decoder, windows=Windows.ALL_LAYERS))
