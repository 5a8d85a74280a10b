"""CamemBERT: RoBERTa for French."""

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_encoder import describe_roberta

ARCHITECTURE = Architecture.of_encoder(__file__, "Camembert", describe_roberta)
