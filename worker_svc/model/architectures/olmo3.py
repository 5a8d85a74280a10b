"""OLMo 3: OLMo 2, some of whose layers have a window and rotary positions of their own."""

from functools import partial

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows
from worker_svc.model.describe_post_norms import describe_olmo

ARCHITECTURE = Architecture.of_decoder(__file__, "Olmo3", partial(describe_olmo, windows=Windows.BY_LAYER_TYPES))
