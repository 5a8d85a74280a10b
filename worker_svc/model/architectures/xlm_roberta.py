"""XLM-RoBERTa: RoBERTa with a vocabulary of many languages, such as bge-m3, bge-reranker and multilingual-e5."""

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_encoder import describe_roberta

ARCHITECTURE = Architecture.of_encoder(__file__, "XLMRoberta", describe_roberta)
