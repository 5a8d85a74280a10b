"""RoBERTa: BERT with one token type, and with positions and a head of its own."""

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_encoder import describe_roberta

ARCHITECTURE = Architecture.of_encoder(__file__, "Roberta", describe_roberta)
