"""The compiled encoder's hidden states are those of transformers for each prompt alone, and so are a prompt's bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertModel

import compiled
import worker_svc.model.compiled_builder
from bert_models import CONTEXT, ENCODERS, hidden_states, random_prompts, save_bert, save_encoder
from described_models import description_of
from quire_kernels.cpu.amx import has_amx
from quire_kernels.cpu.linear import MatrixFormat
from worker_svc.errors import UnsupportedModel
from worker_svc.model.compiled_encoder import CompiledEncoder, load_compiled_encoder
from worker_svc.model.encoder_description import EncoderDescription

# Heads of 16, and sizes that are no multiples of the kernels' 32.
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 300,
}
TOLERANCES = {"amx": 1e-3, "vectors": 1e-4}
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 111, 129, 255, 256, 300]


# By format of weights: how near a random model's states are to those of its own weights, as the median of cosines.
NEAR = {
    MatrixFormat.INT8: 0.999,
    MatrixFormat.W8A8: 0.999,
    MatrixFormat.W4A16: 0.94,
    MatrixFormat.W4A8: 0.94,
}


def load(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    threads: int = 2,
    weights: MatrixFormat = MatrixFormat.PLAIN,
) -> CompiledEncoder:
    description = description_of(directory, EncoderDescription)
    return load_compiled_encoder(description, directory, dtype, compiled.thread_pool(threads), weights)


@pytest.fixture(scope="module", params=["amx", "vectors"], autouse=True)
def products(request: pytest.FixtureRequest) -> Iterator[str]:
    """How products are computed: by AMX, or as on a processor without it."""
    if request.param == "amx" and not has_amx(compiled.thread_pool()):
        pytest.skip("needs AMX")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_svc.model.compiled_builder, "has_amx", lambda _: request.param == "amx")
        yield request.param


@pytest.fixture(scope="module")
def bert(products: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertModel, CompiledEncoder]:
    directory = tmp_path_factory.mktemp("bert")
    return directory, save_bert(directory, **SIZES), load(directory)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=12))
def test_prompts_of_any_lengths_together(
    bert: tuple[Path, BertModel, CompiledEncoder], products: str, lengths: list[int]
) -> None:
    _, model, encoder = bert
    assert encoder.use_amx == (products == "amx")
    tolerance = TOLERANCES[products]
    prompts = random_prompts(lengths)
    for prompt, states in zip(prompts, encoder(prompts), strict=True):
        torch.testing.assert_close(states, hidden_states(model, prompt), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_of_single_tokens_have_the_bits_that_they_have_among_all(
    bert: tuple[Path, BertModel, CompiledEncoder], dtype: torch.dtype
) -> None:
    """After its attention, the last layer computes only these."""
    directory, _, encoder = bert
    encoder = encoder if dtype == torch.float32 else load(directory, dtype)
    prompts, places = random_prompts(LENGTHS), [None if length % 3 == 0 else length // 2 for length in LENGTHS]
    states = encoder(prompts)
    expected = [one if place is None else one[place, None] for one, place in zip(states, places, strict=True)]
    assert all(map(torch.equal, encoder(prompts, places=places), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ENCODERS)
def test_each_architecture(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A crowd, and each prompt alone: bits are the same, and near transformers' states."""
    model, encoder = save_encoder(tmp_path, architecture), load(tmp_path, dtype)
    prompts = random_prompts([1, 2, 15, 16, 17, 33, CONTEXT - 1, CONTEXT])
    for prompt, states in zip(prompts, encoder(prompts), strict=True):
        assert torch.equal(states, encoder([prompt])[0])
        expected = hidden_states(model, prompt)
        if dtype == torch.float32:
            torch.testing.assert_close(states, expected, rtol=1e-3, atol=1e-3)
        else:
            assert torch.cosine_similarity(states.mean(0), expected.mean(0), dim=0) > 0.99


def test_distances_of_long_prompts(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "mpnet", max_position_embeddings=402)
    prompts = random_prompts([400, 129, 65])
    for prompt, states in zip(prompts, load(tmp_path)(prompts), strict=True):
        torch.testing.assert_close(states, hidden_states(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_act": "gelu_new"},
        {"hidden_act": "relu"},
        {"hidden_act": "silu"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 33},
        {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "initializer_range": 0.05},
    ],
    ids=str,
)
def test_other_shapes_and_activations(sizes: dict[str, Any], tmp_path: Path) -> None:
    model = save_bert(tmp_path, **SIZES | sizes)
    prompts = random_prompts([17, 100, 3])
    for prompt, states in zip(prompts, load(tmp_path)(prompts), strict=True):
        torch.testing.assert_close(states, hidden_states(model, prompt), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompts_bits_do_not_depend_on_the_others(
    dtype: torch.dtype, bert: tuple[Path, BertModel, CompiledEncoder]
) -> None:
    encoder = load(bert[0], dtype)
    prompts = random_prompts(LENGTHS)
    alone = [encoder([prompt])[0] for prompt in prompts]
    for together in (encoder(prompts), encoder(prompts[::-1])[::-1], load(bert[0], dtype, threads=1)(prompts)):
        assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_that_is_not_finite_leaves_others_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_bert(tmp_path, **SIZES)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[5] = float("nan")
    model.save_pretrained(tmp_path)
    encoder = load(tmp_path, dtype)
    prompts = [[1, 2, 3], [5] * 40, [4, 3] * 20, [7]]
    expected = [encoder([prompt])[0] for prompt in prompts]
    assert [bool(states.isfinite().all()) for states in expected] == [True, False, True, True]
    for _ in range(2):
        found = encoder(prompts)
        assert all(torch.equal(found[place], expected[place]) for place in (0, 2, 3))
        assert bool(found[1].isnan().all())
        found = encoder(prompts[2:])
        assert all(map(torch.equal, found, expected[2:]))


def test_bfloat16_is_near(bert: tuple[Path, BertModel, CompiledEncoder]) -> None:
    directory, model, _ = bert
    prompts = random_prompts([16, 40, 300])
    for prompt, states in zip(prompts, load(directory, torch.bfloat16)(prompts), strict=True):
        mean, expected = states.mean(0), hidden_states(model, prompt).mean(0)
        assert torch.cosine_similarity(mean, expected, dim=0) > 0.99


@pytest.mark.parametrize("weights", NEAR)
@pytest.mark.parametrize("architecture", ["gte", "nomic_bert"])
def test_weights_in_fewer_bits_of_rotated_heads_and_gates(
    architecture: str, weights: MatrixFormat, tmp_path: Path
) -> None:
    """Of one layer: the errors of several add up."""
    model, prompts = save_encoder(tmp_path, architecture, num_hidden_layers=1), random_prompts([1, 16, 33, CONTEXT])
    encoder = load(tmp_path, weights=weights)
    found = encoder(prompts)
    assert all(torch.equal(encoder([prompt])[0], states) for prompt, states in zip(prompts, found, strict=True))
    expected = torch.cat([hidden_states(model, prompt) for prompt in prompts])
    assert NEAR[weights] < torch.cosine_similarity(torch.cat(found), expected, dim=1).median() < 1 - 1e-5


def test_rotary_positions_of_small_heads_are_left_to_torch(tmp_path: Path) -> None:
    save_encoder(tmp_path, "gte", num_attention_heads=6)
    with pytest.raises(UnsupportedModel, match="rotary positions of an encoder with heads of 16"):
        load(tmp_path)


@pytest.mark.parametrize("weights", NEAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_in_fewer_bits_are_near_and_a_prompts_bits_are_its_own(
    weights: MatrixFormat, dtype: torch.dtype, bert: tuple[Path, BertModel, CompiledEncoder]
) -> None:
    directory, model, _ = bert
    encoder = load(directory, dtype, weights=weights)
    prompts = random_prompts(LENGTHS)
    alone = [encoder([prompt])[0] for prompt in prompts]
    for together in (encoder(prompts), encoder(prompts[::-1])[::-1], load(directory, dtype, 1, weights)(prompts)):
        assert all(map(torch.equal, together, alone))
    last = encoder(prompts, places=[length - 1 for length in LENGTHS])
    assert all(torch.equal(one[0], states[-1]) for one, states in zip(last, alone, strict=True))
    expected = torch.cat([hidden_states(model, prompt) for prompt in prompts])
    cosines = torch.cosine_similarity(torch.cat(alone), expected, dim=1)
    assert NEAR[weights] < cosines.median()
    assert cosines.max() < 1 - 1e-5  # they are in fewer bits


@torch.inference_mode()
def test_tokens_of_a_second_text(bert: tuple[Path, BertModel, CompiledEncoder]) -> None:
    _, model, encoder = bert
    prompts, num_first = random_prompts([1, 40, 64]), [1, 13, 64]
    for prompt, first, states in zip(prompts, num_first, encoder(prompts, num_first), strict=True):
        types = torch.tensor([[0] * first + [1] * (len(prompt) - first)])
        expected = model(torch.tensor([prompt]), token_type_ids=types).last_hidden_state[0]
        torch.testing.assert_close(states, expected, rtol=1e-3, atol=1e-3)


def test_a_shape_that_the_kernels_lack_is_refused_by_name(tmp_path: Path) -> None:
    save_bert(tmp_path, max_position_embeddings=CONTEXT)
    with pytest.raises(UnsupportedModel, match="multiple of 16, not 12"):
        load(tmp_path)
    with pytest.raises(UnsupportedModel, match="float16"):
        load(tmp_path, torch.float16)
