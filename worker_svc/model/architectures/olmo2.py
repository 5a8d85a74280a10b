"""OLMo 2 (arXiv:2501.00656): norms come after attention and MLP, and queries and keys have norms of all heads."""

from functools import partial

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows
from worker_svc.model.describe_post_norms import describe_olmo

ARCHITECTURE = Architecture.of_decoder(__file__, "Olmo2", partial(describe_olmo, windows=Windows.NONE))
