"""The identity of a model as it is served: equal in all processes that compute the same keys and values."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch

import quire_kernels
from worker_svc.model.architecture import identity_of
from worker_svc.model.config import model_types, raw_config
from worker_svc.model.weight_format import format_identity
from worker_svc.model.weights import weight_files

_HEAD_BYTES = 2**20
_SAMPLES = 256
_SAMPLE_BYTES = 4096


def model_fingerprint(
    directory: Path,
    dtype: torch.dtype,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    arithmetic: str = "",
    other_weights: Sequence[Path] = (),
) -> bytes:
    """SHA-256 over the config, dtype, formats of weights, keys and values, and the identity of each weights file.

    `arithmetic` names everything else that bits depend on, if they must be equal; otherwise it is empty.
    `other_weights` are files beside those of the model itself, as of layers behind a pooling. If another package
    registers the architecture or the weight format, its version and module are included.

    A weights file is identified by its size, its first MiB (names and offsets of the tensors), and 256 samples of 4 KiB
    over the rest: reading all of a large model would take longer than loading it. Files that differ only between
    samples count as equal; a training run or a conversion changes all of a file.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    digest.update(f"{dtype} {quantization} {kv_cache_dtype} {arithmetic}".encode())
    for model_type in model_types(raw_config(directory)):
        digest.update(identity_of(model_type))
    digest.update(format_identity(directory))
    for path in (*weight_files(directory), *other_weights):
        digest.update(path.name.encode())
        _add_weights(digest, path)
    return digest.digest()


def kernels_digest() -> str:
    """A digest of the sources of Quire's GPU kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(quire_kernels.__path__[0]).glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def triton_arithmetic(device: torch.device) -> str:
    """What bits of Quire's GPU kernels depend on, beside what they compute."""
    import triton  # only where it is used

    return f"triton {triton.__version__} {torch.__version__} {torch.cuda.get_device_name(device)} {kernels_digest()}"


def _add_weights(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for sample in range(_SAMPLES):
            file.seek(size * sample // _SAMPLES, os.SEEK_SET)
            digest.update(file.read(_SAMPLE_BYTES))
