"""Kinds of processors by what computes Quire's products, of which docs/ have figures each."""

from enum import Enum

from worker_svc import host


class Processor(Enum):
    """What computes products in bfloat16."""

    AMX = "AMX"
    AVX512 = "AVX-512, without AMX"
    AVX2 = "AVX2, without AVX-512"
    OTHER = "other instructions"

    @classmethod
    def this(cls) -> "Processor":
        """That of this machine."""
        flags = host.cpu_flags()
        if "amx_bf16" in flags:
            return cls.AMX
        if "avx512_bf16" in flags:
            return cls.AVX512
        return cls.AVX2 if host.expands_bfloat16() else cls.OTHER
