"""GLM-4-9B and GLM-Edge."""

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_glm import describe_glm

ARCHITECTURE = Architecture.of_decoder(__file__, "Glm", describe_glm)
