"""From settings to a warm replica: sizes, fingerprint, and what cannot be served."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llama_models import VARIANTS
from loaded_worker import load_worker
from runner_driver import Driver
from svc_common.models import ModelNotFound, tokenizer_fingerprint
from svc_common.settings import read_settings
from transformers_models import VARIANTS as OTHERS
from worker_svc.batch import Batch
from worker_svc.description import WorkerLimits
from worker_svc.errors import StartupFailed
from worker_svc.fingerprint import kernels_digest, model_fingerprint
from worker_svc.model.compiled_model import CompiledForward
from worker_svc.prefault import Prefault
from worker_svc.settings import WorkerSettings

# So little memory for blocks that a CPU measures what the largest step leaves.
MEASURED = ("--memory-fraction", "0.001")


def test_the_cache_uses_its_budget_and_no_more(tiny_llama: Path) -> None:
    description = load_worker(tiny_llama, "--cpu-kv-bytes", "1000000", "--dtype", "float32").description
    assert description.limits.num_blocks == 1000000 // description.block_bytes


def test_all_of_it_is_taken_from_the_system_at_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[torch.Tensor] = []

    class Watched(Prefault):
        def __init__(self, memory: torch.Tensor, num_threads: int, available: Callable[[], int]) -> None:
            caches.append(memory)
            super().__init__(memory, num_threads, available)

    monkeypatch.setattr("worker_svc.instance.Prefault", Watched)
    description = load_worker(tiny_llama).description
    assert [cache.nbytes for cache in caches] == [description.limits.num_blocks * description.block_bytes]


def test_no_room_for_a_block_is_said_at_start_up(tiny_llama: Path) -> None:
    with pytest.raises(StartupFailed, match="no memory"):
        load_worker(tiny_llama, "--cpu-kv-bytes", "1000")


@pytest.mark.parametrize("args", [("--num-blocks", "5"), MEASURED], ids=str)
def test_a_model_whose_logits_are_not_finite_is_refused(
    args: tuple[str, str], tiny_llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupFailed, match=r"the logits are not finite.* hold NaN or infinity, or QUIRE_DTYPE is too"):
        load_worker(tmp_path, *args)


def test_the_number_of_blocks_can_be_given(tiny_llama: Path) -> None:
    assert load_worker(tiny_llama, "--num-blocks", "5").description.limits.num_blocks == 5


@pytest.mark.parametrize("args", [("--num-blocks", "1"), ("--max-step-tokens", "1"), ("--max-sequences", "1")])
def test_the_smallest_budgets_start(args: tuple[str, str], tiny_llama: Path) -> None:
    load_worker(tiny_llama, *args)


@pytest.mark.parametrize("variant", ["llama", "llama-rope-yarn", "mistral-window"])
def test_the_context_can_be_limited_without_a_change_of_tokens(variant: str, save_model: Callable[..., Path]) -> None:
    directory = save_model(VARIANTS[variant]())
    small = ("--dtype", "float32", "--num-blocks", "8")
    whole, limited = (load_worker(directory, *small, *more) for more in ((), ("--max-model-len", "48")))
    assert (whole.description.limits.context_length, limited.description.limits.context_length) == (256, 48)
    assert limited.description.fingerprint == whole.description.fingerprint
    first, second = (Driver(replica.runner).generate([list(range(1, 31))], 17) for replica in (whole, limited))
    assert first == second
    with pytest.raises(AssertionError, match="49 tokens exceed the context of 48"):
        Driver(limited.runner).generate([list(range(1, 50))], 1)


def test_a_model_of_another_family_can_be_limited_too(save_model: Callable[..., Path]) -> None:
    limits = load_worker(save_model(OTHERS["phi"]()), "--max-model-len", "40", "--num-blocks", "5").description.limits
    assert limits.context_length == 40


def test_blocks_are_sized_by_steps_of_the_limited_context(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled: list[int] = []

    def run(limits: WorkerLimits, make_runner: object, device_type: str) -> None:
        profiled.append(limits.context_length)

    monkeypatch.setattr("worker_svc.instance.run_largest_step", run)
    load_worker(tiny_llama, "--max-model-len", "33", *MEASURED)
    assert profiled == [33]


@pytest.mark.parametrize("length", ["3", "256"])
def test_the_least_and_the_models_own_context_start(length: str, tiny_llama: Path) -> None:
    description = load_worker(tiny_llama, "--max-model-len", length, "--num-blocks", "5").description
    assert description.limits.context_length == int(length)


@pytest.mark.parametrize(("model", "own"), [("llama", 256), ("phi", 128)])
def test_a_longer_context_than_the_models_is_refused_with_both(
    model: str, own: int, save_model: Callable[..., Path]
) -> None:
    directory = save_model((VARIANTS | OTHERS)[model]())
    with pytest.raises(StartupFailed, match=f"QUIRE_MAX_MODEL_LEN is {own + 1}, .* is {own} tokens"):
        load_worker(directory, "--max-model-len", str(own + 1))


@pytest.mark.parametrize("length", [1, 2, 2**31, 10**12, 2**63])
def test_a_model_whose_context_is_no_length_is_refused_by_the_field(
    length: int, tiny_llama: Path, tmp_path: Path
) -> None:
    _with_config(tiny_llama, tmp_path, max_position_embeddings=length)
    with pytest.raises(StartupFailed, match=f"is {length} tokens, by max_position_embeddings .* between 3 and 2147483"):
        load_worker(tmp_path, "--num-blocks", "5")


def _with_config(model: Path, directory: Path, **fields: Any) -> None:
    """Copies a model, with other fields in its config.json."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_at_start_up(tiny_llama: Path) -> None:
    with pytest.raises(StartupFailed, match="no GPU"):
        load_worker(tiny_llama, "--device", "cuda")


def test_the_host_has_as_many_blocks_as_its_space_holds(tiny_llama: Path) -> None:
    description = load_worker(tiny_llama, "--num-blocks", "5", "--swap-space", "0.001").description
    assert description.limits.num_host_blocks == int(0.001 * 2**30) // description.block_bytes > 0


def test_rates_are_measured_before_anything_is_served(tiny_llama: Path) -> None:
    description = load_worker(tiny_llama, "--num-blocks", "5").description
    assert description.limits.num_host_blocks == 5
    assert description.prefill_tokens_per_second > 0
    assert description.swap_bytes_per_second > 0


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--num-blocks", "5"), 64),
        (("--num-blocks", "12800"), 100),
        (("--num-blocks", "40000"), 256),
        (("--num-blocks", "12800", "--max-sequences", "8"), 8),
    ],
    ids=str,
)
def test_a_step_holds_more_sequences_where_the_kv_memory_has_room(
    args: tuple[str, ...], expected: int, tiny_llama: Path
) -> None:
    limits = load_worker(tiny_llama, "--device", "cpu", "--swap-space", "0", *args).description.limits
    assert limits.max_sequences == expected


def test_without_host_blocks_there_is_no_rate_of_swaps(tiny_llama: Path) -> None:
    description = load_worker(tiny_llama, "--num-blocks", "5", "--swap-space", "0").description
    assert description.limits.num_host_blocks == 0
    assert description.swap_bytes_per_second == 0


def test_swaps_that_are_held_back_are_measured_so(tiny_llama: Path) -> None:
    description = load_worker(tiny_llama, "--num-blocks", "5", "--swap-rate", "1000000").description
    assert description.swap_bytes_per_second <= 1.01e6


@pytest.mark.parametrize(("dtype", "kernels"), [("int8", "triton"), ("fp8", "triton"), ("int8", "compiled")])
def test_keys_and_values_may_be_kept_in_8_bits(dtype: str, kernels: str, tiny_llama: Path) -> None:
    small = ("--kernels", kernels, "--num-blocks", "2", "--max-step-tokens", "4", "--max-sequences", "2")
    description = load_worker(tiny_llama, "--kv-cache-dtype", dtype, *small).description
    # Keys and values, layers, heads, tokens; 64 codes and a scale
    assert description.block_bytes == 2 * 2 * 2 * 16 * (64 + 4)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--swap-space", "1000000"), "QUIRE_SWAP_SPACE"),
        (("--swap-space", "0.0000001"), "QUIRE_SWAP_SPACE"),
        (("--num-blocks", "1000000000"), "QUIRE_NUM_BLOCKS"),
        (("--kv-cache-dtype", "fp8"), "QUIRE_KV_CACHE_DTYPE is fp8, which is for a GPU"),
        (("--kv-cache-dtype", "int8", "--kernels", "torch"), "QUIRE_KV_CACHE_DTYPE is int8, which torch's kernels"),
    ],
)
def test_what_the_machine_cannot_do_is_refused_by_the_settings_name(
    args: tuple[str, ...], named: str, tiny_llama: Path
) -> None:
    if "--kv-cache-dtype" in args and torch.cuda.is_available():
        args = (*args, "--device", "cpu")
    with pytest.raises(StartupFailed, match=named):
        load_worker(tiny_llama, *args)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--num-blocks", "0"), "QUIRE_NUM_BLOCKS"),
        (("--max-model-len", "2"), "QUIRE_MAX_MODEL_LEN"),
        (("--max-model-len", "1k"), "QUIRE_MAX_MODEL_LEN"),
        (("--swap-space", "-1"), "QUIRE_SWAP_SPACE"),
        (("--swap-space", "nan"), "QUIRE_SWAP_SPACE"),
        (("--swap-space", "inf"), "QUIRE_SWAP_SPACE"),
        (("--swap-rate", "0"), "QUIRE_SWAP_RATE"),
        (("--kv-cache-dtype", "fp4"), "QUIRE_KV_CACHE_DTYPE"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_the_settings_name(
    args: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(WorkerSettings, list(args))
    assert named in capsys.readouterr().err


def _tokenizer_directory(path: Path, vocab_size: int) -> Path:
    path.mkdir()
    vocab = {f"t{token_id}": token_id for token_id in range(vocab_size)}
    Tokenizer(WordLevel(vocab, unk_token="t0")).save(str(path / "tokenizer.json"))
    return path


def test_the_fingerprint_of_the_tokenizer_is_that_of_the_settings(tiny_llama: Path, tmp_path: Path) -> None:
    other = _tokenizer_directory(tmp_path / "other", 97)
    own, replaced = (load_worker(tiny_llama, "--num-blocks", "5", *more) for more in ((), ("--tokenizer", str(other))))
    assert own.description.tokenizer_fingerprint == tokenizer_fingerprint(tiny_llama)
    assert replaced.description.tokenizer_fingerprint == tokenizer_fingerprint(other)
    assert replaced.description.fingerprint == own.description.fingerprint


def test_a_tokenizer_with_ids_beyond_the_models_vocabulary_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    other = _tokenizer_directory(tmp_path / "other", 98)
    parts = json.loads((other / "tokenizer.json").read_text())
    with pytest.raises(StartupFailed, match=r"QUIRE_TOKENIZER: .* up to 97, but the model's vocabulary has 97"):
        load_worker(tiny_llama, "--tokenizer", str(other))
    # tokenizers raises Exception for the first one, and panics for the second one.
    for damaged in ({}, {**parts, "normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}):
        (other / "tokenizer.json").write_text(json.dumps(damaged))
        with pytest.raises(StartupFailed, match=r"QUIRE_TOKENIZER: .*tokenizer\.json cannot be used"):
            load_worker(tiny_llama, "--tokenizer", str(other))


def test_a_revision_of_the_tokenizer_with_ids_beyond_the_vocabulary_is_refused_by_its_name(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for revision in ("main", "v1"):
        (repository / "refs" / revision).write_text(f"commit-{revision}")
    shutil.copytree(tiny_llama, repository / "snapshots" / "commit-main")
    _tokenizer_directory(repository / "snapshots" / "commit-v1", 98)
    with pytest.raises(
        StartupFailed, match=r"^QUIRE_TOKENIZER_REVISION: .* up to 97, but the model's vocabulary has 97"
    ):
        load_worker(Path("owner/name"), "--tokenizer-revision", "v1")


def test_a_model_has_the_name_of_the_settings(tiny_llama: Path) -> None:
    assert (
        load_worker(tiny_llama, "--num-blocks", "5", "--served-model-name", "mine, alias").description.model == "mine"
    )


def test_a_revision_of_a_directory_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ModelNotFound, match="QUIRE_REVISION is v1"):
        load_worker(tiny_llama, "--revision", "v1")


def test_a_drafter_is_described_and_does_not_change_the_fingerprint(tiny_llama: Path) -> None:
    plain, drafting = (load_worker(tiny_llama, "--num-blocks", "5", "--drafter", name) for name in ("none", "ngram"))
    fewer = load_worker(tiny_llama, "--num-blocks", "5", "--drafter", "ngram", "--max-draft-tokens", "2")
    limits = [instance.description.limits for instance in (plain, drafting, fewer)]
    assert [one.max_draft_tokens for one in limits] == [0, 4, 2]
    assert plain.description.fingerprint == drafting.description.fingerprint
    assert Driver(drafting.runner).generate([[1] * 20], 6) == Driver(plain.runner).generate([[1] * 20], 6)


@pytest.mark.parametrize("args", [("--max-step-tokens", "1"), ("--max-sequences", "1"), ("--max-model-len", "3")])
def test_a_drafter_starts_with_the_smallest_budgets(args: tuple[str, str], tiny_llama: Path) -> None:
    load_worker(tiny_llama, "--drafter", "ngram", *args)


def test_the_memory_of_the_maximum_of_sampled_rows_is_measured(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows: list[int] = []
    forward = CompiledForward.__call__

    def counting(model: CompiledForward, batch: Batch) -> torch.Tensor:
        num_rows.append(len(batch.logits_indices))
        return forward(model, batch)

    monkeypatch.setattr(CompiledForward, "__call__", counting)
    limits = load_worker(tiny_llama, "--drafter", "ngram", "--max-sequences", "16").description.limits
    assert max(num_rows) == limits.max_sampled_rows == 16 * 5


def test_an_unknown_drafter_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(StartupFailed, match="QUIRE_DRAFTER is eagle"):
        load_worker(tiny_llama, "--drafter", "eagle")


def test_equal_models_have_equal_fingerprints(tiny_llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama, copy)
    assert model_fingerprint(copy, torch.float32) == model_fingerprint(tiny_llama, torch.float32)


def test_deterministic_mode_serves_what_the_compiled_kernels_compute(tiny_llama: Path) -> None:
    plain = load_worker(tiny_llama, "--num-blocks", "5").description.fingerprint
    first, second = (load_worker(tiny_llama, "--num-blocks", "5", "--deterministic", "true") for _ in range(2))
    assert first.description.fingerprint == second.description.fingerprint != plain


def test_a_worker_in_deterministic_mode_reports_the_same_limits(tiny_llama: Path) -> None:
    """So the scheduler plans the same steps. Only the fingerprint differs, and rates, which are measured."""
    plain, deterministic = (load_worker(tiny_llama, "--deterministic", each).description for each in ("false", "true"))
    others: dict[str, Any] = {"fingerprint": b"", "swap_bytes_per_second": 0.0, "prefill_tokens_per_second": 0.0}
    assert replace(plain, **others) == replace(deterministic, **others)


def test_the_digest_of_the_kernels_depends_on_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for sources in (b"a", b"a", b"b"):
        (tmp_path / "kernel.py").write_bytes(sources)
        monkeypatch.setattr("quire_kernels.__path__", [str(tmp_path)])
        digests.append(kernels_digest())
    assert digests[0] == digests[1] != digests[2]


def test_dtypes_config_and_weights_change_the_fingerprint(
    tiny_llama: Path, tmp_path: Path, save_model: Callable[..., Path]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] += 1
    save_file(tensors, copy / "model.safetensors")
    fingerprints = {
        model_fingerprint(tiny_llama, torch.float32),
        model_fingerprint(tiny_llama, torch.bfloat16),
        model_fingerprint(tiny_llama, torch.float32, kv_cache_dtype="int8"),
        model_fingerprint(tiny_llama, torch.float32, kv_cache_dtype="fp8"),
        model_fingerprint(tiny_llama, torch.float32, arithmetic="compiled"),
        model_fingerprint(copy, torch.float32),
        model_fingerprint(save_model(VARIANTS["mistral"]()), torch.float32),
    }
    assert len(fingerprints) == 7
