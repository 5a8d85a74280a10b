"""Hunyuan's dense models: queries and keys are normalised head by head after rotation, whose base may be stretched."""

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_hunyuan import describe_hunyuan

ARCHITECTURE = Architecture.of_decoder(__file__, "HunYuanDenseV1", describe_hunyuan)
