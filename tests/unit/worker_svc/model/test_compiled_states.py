"""Hidden states of a decoder by compiled code are those of transformers for each prompt alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, LlamaConfig

import compiled
import dense_models
import latent_models
import llama_models
import transformers_models
from described_models import description_of
from llama_models import hidden_states, prompts, save_model
from worker_svc.errors import UnsupportedModel
from worker_svc.model.compiled_states import CompiledStates, load_compiled_states, prompt_bytes, unsupported_reason
from worker_svc.model.description import ModelDescription

_SMALL_HEADS = ("qwen2", "qwen2-window")  # of 8 dimensions, which torch computes
VARIANTS = {
    **{name: make for name, make in llama_models.VARIANTS.items() if name not in _SMALL_HEADS},
    **dense_models.VARIANTS,
    **{
        name: transformers_models.VARIANTS[name]
        for name in ("mixtral", "qwen2-moe", "qwen3-moe-mixed", "olmoe", "gpt-oss")
    },
    **latent_models.VARIANTS,
    **dense_models.BIDIRECTIONAL,
}
LENGTHS = (1, 2, 15, 16, 17, 33, 63, 63, 111)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> CompiledStates:
    description = description_of(directory, ModelDescription)
    return load_compiled_states(description, directory, dtype, compiled.thread_pool())


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_states_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant]())
    states, context = load(tmp_path), description_of(tmp_path, ModelDescription).context_length
    crowd = prompts(*(length for length in LENGTHS if length <= context))
    for prompt, found in zip(crowd, states(crowd), strict=True):
        torch.testing.assert_close(found, hidden_states(tmp_path, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "variant", ["qwen3", "gemma3", "gpt2", "olmoe", "deepseek-v2-lite", "gemma3 in both directions"]
)
@torch.inference_mode()
def test_a_prompts_bits_do_not_depend_on_the_others(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Nor on those of the calls before, whose keys and values lie where its own do."""
    save_model(tmp_path, VARIANTS[variant]())
    states, crowd = load(tmp_path, dtype), prompts(3, 17, 1, 9, 63)
    alone = [states([prompt])[0] for prompt in crowd]
    assert all(map(torch.equal, alone, states(crowd)))
    assert all(map(torch.equal, alone[::-1], states(crowd[::-1])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "variant", ["qwen3", "gemma3", "gpt2", "olmoe", "deepseek-v2-lite", "gemma3 in both directions"]
)
@torch.inference_mode()
def test_states_of_single_tokens_have_the_bits_that_they_have_among_all(
    variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """After its attention, the last layer computes only these."""
    save_model(tmp_path, VARIANTS[variant]())
    states, crowd, places = load(tmp_path, dtype), prompts(3, 40, 1, 17, 63, 20), [2, 0, 0, None, 50, 19]
    wanted = states(crowd, places=places)
    expected = [one if place is None else one[place, None] for one, place in zip(states(crowd), places, strict=True)]
    assert all(map(torch.equal, wanted, expected))


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma2", "phi3"])
@torch.inference_mode()
def test_bfloat16_is_near(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant]())
    crowd = prompts(5, 40)
    for prompt, states in zip(crowd, load(tmp_path, torch.bfloat16)(crowd), strict=True):
        assert torch.cosine_similarity(states[-1], hidden_states(tmp_path, prompt)[-1], dim=0) > 0.99


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path / "heads", LlamaConfig(**llama_models.SIZES | {"head_dim": 12}))
    description = description_of(tmp_path / "heads", ModelDescription)
    refused = unsupported_reason(description, torch.float32)
    assert refused is not None
    assert "12" in refused
    with pytest.raises(UnsupportedModel, match="the compiled kernels cannot be used"):
        load(tmp_path / "heads")


@pytest.mark.parametrize(
    "variant",
    [
        "mixtral", "qwen2-moe", "qwen3-moe-mixed", "olmoe", "deepseek-v2-lite", "gpt-oss", "minimax-m2", "granite-moe",
        "k-exaone", "ernie4-5-moe",
    ],
)  # fmt: skip
@pytest.mark.parametrize("original", [True, False], ids=["the model's names", "transformers' names"])
@torch.inference_mode()
def test_a_checkpoint_without_a_head(variant: str, tmp_path: Path, *, original: bool) -> None:
    save_model(tmp_path / "whole", (transformers_models.VARIANTS | latent_models.VARIANTS)[variant]())
    whole = AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    whole.save_pretrained(tmp_path / "bare", save_original_format=original)
    (prompt,) = prompts(40)
    (states,) = load(tmp_path / "bare")([prompt])
    torch.testing.assert_close(states, hidden_states(tmp_path / "whole", prompt), rtol=1e-4, atol=1e-4)


_MEASURED = """
import sys
from pathlib import Path
import torch
import compiled
from described_models import description_of
from worker_svc.model.compiled_states import load_compiled_states
from worker_svc.model.description import ModelDescription
directory = Path(sys.argv[1])
states = load_compiled_states(
    description_of(directory, ModelDescription), directory, torch.float32, compiled.thread_pool()
)

def memory():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024

with torch.inference_mode():
    states([[1] * 16])
    before = memory()
    kept = states([[1] * int(sys.argv[2])])
    print(memory() - before)
"""


@pytest.mark.parametrize(
    "variant", ["llama", "gpt2", "olmoe", "deepseek-v2-lite", "deepseek-v3", "gemma4-small", "gemma4-experts"]
)
def test_the_memory_of_a_prompt_is_known_about(variant: str, tmp_path: Path) -> None:
    """Measured in a process of its own."""
    num_tokens, config = 4_000, VARIANTS[variant]()
    config.max_position_embeddings = num_tokens
    save_model(tmp_path, config)
    estimate = prompt_bytes(description_of(tmp_path, ModelDescription), num_tokens, torch.float32)
    command = (sys.executable, "-c", _MEASURED, str(tmp_path), str(num_tokens))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    measured = int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    assert 0.6 * measured < estimate < 2 * measured
