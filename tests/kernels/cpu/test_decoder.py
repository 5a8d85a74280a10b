"""The compiled forward pass of decoders against torch in float64: random models of two layers, a feature at a time."""

import math
from collections.abc import Callable

import pytest
import torch

import compiled
import quire_kernels.cpu.decoder
from compiled_decoder import BLOCK_SIZE, Compiled
from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.amx import has_amx
from quire_kernels.cpu.decoder import Decoder, DecoderModelArgs
from quire_kernels.cpu.norms import NormCode
from random_decoder import (
    CONTEXT,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    RandomDecoder,
    RandomInput,
    RandomInputs,
    RandomLayer,
    RandomNorm,
)

# Heads of whole panels, whose halves are paired.
WHOLE_DIMS = [32, 96, 128]
LENGTH = 70


Change = Callable[[RandomDecoder], None]


def layer_norms(model: RandomDecoder) -> None:
    model.embedding += 3
    model.norm = RandomNorm(HIDDEN, NormCode.LAYER)
    for layer in model.layers:
        layer.attention_norm, layer.mlp_norm = (RandomNorm(HIDDEN, NormCode.LAYER) for _ in range(2))


def epsilons(model: RandomDecoder) -> None:
    model.layers[0].attention_norm = RandomNorm(HIDDEN, epsilon=0.5)
    model.layers[1].mlp_norm = RandomNorm(HIDDEN, epsilon=2.0)
    model.norm.epsilon = 1.0


def head_norms(model: RandomDecoder) -> None:
    for layer in model.layers:
        layer.query_norm, layer.key_norm = RandomNorm(model.dim), RandomNorm(model.dim)


def norms_after_rotation(model: RandomDecoder) -> None:
    head_norms(model)
    model.ropes = [(torch.logspace(0, -3, 5), 1.3)]
    for layer in model.layers:
        layer.norms_after_rotation = True


def one_head_norm(model: RandomDecoder) -> None:
    model.layers[0].query_norm = RandomNorm(model.dim, NormCode.LAYER)
    model.layers[1].key_norm = RandomNorm(model.dim)


def joint_norms(model: RandomDecoder) -> None:
    for layer in model.layers:
        layer.query_norm, layer.key_norm = RandomNorm(HEADS * model.dim), RandomNorm(KV_HEADS * model.dim)
        layer.has_joint_norms = True


def post_norms(model: RandomDecoder) -> None:
    for layer in model.layers:
        layer.post_attention_norm, layer.post_mlp_norm = RandomNorm(HIDDEN), RandomNorm(HIDDEN)


def one_post_norm(model: RandomDecoder) -> None:
    model.layers[0].post_attention_norm = RandomNorm(HIDDEN)
    model.layers[1].post_mlp_norm = RandomNorm(HIDDEN, NormCode.LAYER)


def post_norms_alone(model: RandomDecoder) -> None:
    post_norms(model)
    for layer in model.layers:
        layer.attention_norm, layer.mlp_norm = None, None


def parallel_without_norms(model: RandomDecoder) -> None:
    post_norms_alone(model)
    parallel(model)


def no_positions(model: RandomDecoder) -> None:
    model.ropes = []
    for layer in model.layers:
        layer.rope = None


def one_layer_without_positions(model: RandomDecoder) -> None:
    model.layers[0].rope = None


def two_ropes(model: RandomDecoder) -> None:
    model.ropes.append((torch.logspace(0, -2, model.dim // 2), 1.3))
    model.layers[0].rope = 1


def partial_rotation(model: RandomDecoder) -> None:
    model.ropes = [(torch.logspace(0, -3, 3), 1.0), (torch.logspace(0, -3, 5), 0.9)]
    model.layers[1].rope = 1


def position_embedding(model: RandomDecoder) -> None:
    model.positions = torch.randn(CONTEXT, HIDDEN)


def embedding_scale(model: RandomDecoder) -> None:
    model.embedding /= 4
    model.embedding_scale = 6.5
    position_embedding(model)


def parallel(model: RandomDecoder) -> None:
    for layer in model.layers:
        layer.is_parallel = True


def one_parallel_layer_with_post_norms(model: RandomDecoder) -> None:
    post_norms(model)
    model.layers[0].is_parallel = True


def activation(code: ActivationCode, is_gated: bool) -> Change:
    def change(model: RandomDecoder) -> None:
        for layer in model.layers:
            layer.activation, layer.is_gated = code, is_gated

    return change


def widths(model: RandomDecoder) -> None:
    model.layers[0].resize(130)
    model.layers[1].resize(33)
    model.layers[1].is_gated = False


def whole_panels(model: RandomDecoder) -> None:
    model.layers[0].resize(96)
    model.layers[1].resize(64)
    model.layers[1].is_gated = False


def rows_of_whole_pages(model: RandomDecoder) -> None:
    model.layers[0].resize(1024)
    model.layers[1].resize(2048)


def heads_of_two_sizes(model: RandomDecoder) -> None:
    model.ropes.append((torch.logspace(0, -3, 24), 1.0))
    model.layers[1].resize_heads(48)
    model.layers[1].rope = 1


def value_norms(model: RandomDecoder) -> None:
    for layer in model.layers:
        layer.value_norm = RandomNorm(layer.dim)


def values_that_are_keys(model: RandomDecoder) -> None:
    head_norms(model)
    value_norms(model)
    for layer in model.layers:
        layer.resize_heads(layer.dim, kv_parts=1)
        layer.values_are_keys = True


def shared_keys(model: RandomDecoder) -> None:
    for _ in range(2):
        layer = RandomLayer(model.dim)
        layer.resize_heads(model.dim, kv_parts=0)
        layer.shared = 1
        model.layers.append(layer)


def layer_scales(model: RandomDecoder) -> None:
    post_norms(model)
    model.layers[0].scale, model.layers[1].scale = 0.3, -1.7


def layer_inputs(model: RandomDecoder) -> None:
    shared_keys(model)
    model.layers[3].scale = 0.4
    model.inputs = RandomInputs(21, len(model.layers))
    for layer in model.layers:
        layer.input = RandomInput(21)


def head_bias(model: RandomDecoder) -> None:
    model.head_bias = torch.randn(VOCAB) * 3


def logits_scale(model: RandomDecoder) -> None:
    model.head_bias, model.logits_scale, model.logits_soft_cap = torch.randn(VOCAB), 0.3, 2.5


def logits_soft_cap(model: RandomDecoder) -> None:
    model.head *= 3
    model.logits_soft_cap = 2.5


CHANGES: dict[str, Change] = {
    **{change.__name__: change for change in (
        layer_norms, epsilons, head_norms, norms_after_rotation, one_head_norm, joint_norms, post_norms, one_post_norm,
        post_norms_alone, parallel_without_norms, no_positions, one_layer_without_positions, two_ropes,
        partial_rotation, position_embedding, embedding_scale, parallel, one_parallel_layer_with_post_norms, widths,
        whole_panels, rows_of_whole_pages, head_bias, logits_scale, logits_soft_cap, heads_of_two_sizes, value_norms,
        values_that_are_keys, shared_keys, layer_scales, layer_inputs,
    )},
    **{
        f"{'gated' if is_gated else 'plain'}-{code.name.lower()}": activation(code, is_gated)
        for code in ActivationCode
        for is_gated in (True, False)
        if is_gated or code is not ActivationCode.SWIGLU_OAI
    },
}  # fmt: skip
ARITHMETICS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "amx": (torch.bfloat16, True),
}

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest) -> tuple[torch.dtype, bool]:
    dtype, use_amx = ARITHMETICS[request.param]
    if use_amx and not has_amx(compiled.thread_pool()):
        pytest.skip("needs AMX")
    return dtype, use_amx


@pytest.mark.parametrize("name", CHANGES)
@torch.inference_mode()
def test_logits_are_those_of_torch(name: str, arithmetic: tuple[torch.dtype, bool]) -> None:
    dtype, use_amx = arithmetic
    tokens = torch.arange(LENGTH) * 7 % VOCAB
    plain, model = RandomDecoder(), RandomDecoder()
    CHANGES[name](model)
    for each in (plain, model):
        each.round_to(dtype)
    expected = model.logits(tokens)
    found = Compiled(model, dtype, use_amx).logits(tokens).double()
    tolerance = TOLERANCES[dtype]
    assert (found - expected).norm() < tolerance * expected.norm()
    # The feature matters, more than that.
    if name != "gated-silu":
        assert (plain.logits(tokens) - expected).norm() > 3 * tolerance * expected.norm()


@pytest.mark.parametrize("resize", [widths, whole_panels, heads_of_two_sizes, layer_inputs])
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_steps_of_any_size(resize: Change, arithmetic: tuple[torch.dtype, bool]) -> None:
    dtype, use_amx = arithmetic
    model = RandomDecoder()
    for change in (layer_norms, one_post_norm, two_ropes, resize):
        change(model)
    model.round_to(dtype)
    tokens = torch.arange(LENGTH) * 7 % VOCAB
    whole = Compiled(model, dtype, use_amx).logits(tokens)
    for size in (1, 5, 33):
        assert torch.equal(Compiled(model, dtype, use_amx).logits_in_steps(tokens, size), whole)


@pytest.mark.parametrize("change", [None, layer_inputs])
@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_others_are_sampled(
    change: Change | None, arithmetic: tuple[torch.dtype, bool]
) -> None:
    """The last layer's attention leaves out tiles of queries after which no token is sampled, and layers behind the
    last keys compute sampled tokens alone.
    """
    dtype, use_amx = arithmetic
    model = RandomDecoder()
    if change is not None:
        change(model)
    model.round_to(dtype)
    tokens = torch.arange(LENGTH) * 7 % VOCAB
    decoder = Compiled(model, dtype, use_amx)
    whole, argmax = decoder.compute(tokens)
    for places in ([LENGTH - 1], [0], [3, 4, LENGTH // 2], [], list(range(0, LENGTH, 9))):
        sampled = torch.tensor(places, dtype=torch.int64)
        logits, found = decoder.compute(tokens, sampled=sampled)
        assert torch.equal(logits, whole[sampled])
        assert torch.equal(found, argmax[sampled])


@pytest.mark.parametrize("dim", WHOLE_DIMS)
@pytest.mark.parametrize(
    "change", [no_positions, one_layer_without_positions, two_ropes, partial_rotation, one_head_norm, joint_norms]
)
@torch.inference_mode()
def test_paired_halves_change_no_bit(change: Change, dim: int, arithmetic: tuple[torch.dtype, bool]) -> None:
    dtype, use_amx = arithmetic
    model = RandomDecoder(dim)
    change(model)
    model.round_to(dtype)
    tokens = torch.arange(LENGTH) * 7 % VOCAB
    expected = Compiled(model, dtype, use_amx).logits(tokens)
    difference = expected.double() - model.logits(tokens)
    assert difference.norm() < TOLERANCES[dtype] * expected.norm()
    for size in (LENGTH, 33, 1):
        paired = Compiled(model, dtype, use_amx, pairs_halves=True)
        assert torch.equal(paired.logits_in_steps(tokens, size), expected)
        # Tokens that are computed again, and are not stored.
        assert torch.equal(paired.logits(tokens[30:], 30, 27), expected[30:])


@pytest.mark.parametrize("dim", WHOLE_DIMS)
@pytest.mark.parametrize(("block_size", "has_codes"), [(8, False), (32, False), (BLOCK_SIZE, True)])
@torch.inference_mode()
def test_paired_halves_change_no_bit_of_other_caches(
    block_size: int, has_codes: bool, dim: int, arithmetic: tuple[torch.dtype, bool]
) -> None:
    dtype, use_amx = arithmetic
    model = RandomDecoder(dim)
    model.round_to(dtype)
    tokens = torch.arange(LENGTH) * 7 % VOCAB
    expected, found = (
        Compiled(model, dtype, use_amx, pairs_halves=pairs, has_codes=has_codes, block_size=block_size).logits(tokens)
        for pairs in (False, True)
    )
    assert torch.equal(found, expected)
    difference = expected.double() - model.logits(tokens)
    assert difference.norm() < (5e-2 if has_codes else TOLERANCES[dtype]) * expected.norm()


@torch.inference_mode()
def test_a_row_that_is_not_finite_leaves_no_trace(arithmetic: tuple[torch.dtype, bool]) -> None:
    dtype, use_amx = arithmetic
    model = RandomDecoder()
    layer_norms(model)
    model.embedding[0, 0] = float("nan")
    model.round_to(dtype)
    decoder, tokens = Compiled(model, dtype, use_amx), torch.arange(1, 40)
    expected = decoder.logits(tokens)
    assert bool(decoder.logits(torch.zeros(40, dtype=torch.int64)).isnan().all())
    assert torch.equal(decoder.logits(tokens), expected)


@pytest.mark.parametrize("length", [1, 16, 17, LENGTH])
@torch.inference_mode()
def test_the_largest_logits_are_found_where_none_are_written(length: int, arithmetic: tuple[torch.dtype, bool]) -> None:
    dtype, use_amx = arithmetic
    model = RandomDecoder()
    # Equal logits in one panel and in several, of which the first counts.
    for token in (5, 20, 40, VOCAB - 1):
        model.head[token] = 3 * model.head[33]
    model.head[50] = -model.head[5]
    model.round_to(dtype)
    decoder = Compiled(model, dtype, use_amx)
    tokens = torch.randint(VOCAB, (length,))
    logits = decoder.logits(tokens)
    needs_logits = torch.arange(length) % 3 == 1
    written, argmax = decoder.compute(tokens, needs_logits=needs_logits)
    assert torch.equal(argmax, logits.argmax(-1))
    assert torch.equal(written[needs_logits], logits[needs_logits])
    assert written[~needs_logits].isnan().all()


@torch.inference_mode()
def test_padding_of_a_panel_is_never_the_largest(arithmetic: tuple[torch.dtype, bool]) -> None:
    dtype, use_amx = arithmetic
    model = RandomDecoder()
    model.head_bias = torch.full((VOCAB,), -100.0)
    model.round_to(dtype)
    assert Compiled(model, dtype, use_amx).logits(torch.arange(20)).max() < 0


@pytest.mark.parametrize("place", [0, 15, 16, 31, VOCAB - 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@torch.inference_mode()
def test_one_logit_that_is_not_finite_leaves_no_argmax(
    value: float, place: int, arithmetic: tuple[torch.dtype, bool]
) -> None:
    dtype, use_amx = arithmetic
    model = RandomDecoder()
    model.head_bias = torch.zeros(VOCAB)
    model.head_bias[place] = value
    model.round_to(dtype)
    _, argmax = Compiled(model, dtype, use_amx).compute(torch.arange(3))
    assert argmax.tolist() == [-1, -1, -1]


def test_amx_is_refused_where_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = DecoderModelArgs()
    with pytest.raises(ValueError, match="use_amx: must be false for another dtype than bfloat16"):
        Decoder(compiled.thread_pool(), torch.float32, arguments, use_amx=True)
    monkeypatch.setattr(quire_kernels.cpu.decoder, "has_amx", lambda _: False)
    with pytest.raises(ValueError, match="use_amx: must be false on a processor without AMX"):
        Decoder(compiled.thread_pool(), torch.bfloat16, arguments, use_amx=True)
