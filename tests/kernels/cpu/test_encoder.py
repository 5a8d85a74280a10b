"""Ops of the compiled encoder against torch in float64: one layer, whose other products are zero."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, pad, relu, scaled_dot_product_attention, silu

import compiled
import quire_kernels.cpu.encoder
from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.amx import has_amx, pack_for_amx
from quire_kernels.cpu.encoder import PADDING, DistanceScoresArgs, Encoder, EncoderLayerArgs, EncoderModelArgs
from quire_kernels.cpu.linear import PackedMatrix, pack_matrix
from quire_kernels.cpu.norms import NormCode, pack_norm

HEADS, HIDDEN, INTERMEDIATE, EPSILON = 3, 48, 80, 1e-5
# Every border of panels, tiles of keys and blocks of queries.
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 257]
ACTIVATIONS: dict[ActivationCode, Callable[[Tensor], Tensor]] = {
    ActivationCode.GELU: gelu,
    ActivationCode.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    ActivationCode.SILU: silu,
    ActivationCode.RELU: relu,
    ActivationCode.RELU2: lambda x: relu(x).square(),
}
TOLERANCES = {(torch.float32, False): 1e-5, (torch.float32, True): 1e-3, (torch.bfloat16, False): 4e-2}


@pytest.fixture(params=[False, True], ids=["vectors", "amx"])
def use_amx(request: pytest.FixtureRequest) -> bool:
    if request.param and not has_amx(compiled.thread_pool()):
        pytest.skip("needs AMX")
    return bool(request.param)


class OneLayer:
    """An encoder whose token i has the embedding words[i], and a layer whose products are zero unless they are set."""

    def __init__(self, dtype: torch.dtype, use_amx: bool, num_words: int) -> None:
        self.dtype, self.use_amx = dtype, use_amx
        self.words = torch.randn(num_words, HIDDEN).to(dtype)
        self.qkv = torch.zeros(3 * HIDDEN, HIDDEN, dtype=dtype)
        self.output = torch.zeros(HIDDEN, HIDDEN, dtype=dtype)
        self.up = torch.zeros(INTERMEDIATE, HIDDEN, dtype=dtype)
        self.down = torch.zeros(HIDDEN, INTERMEDIATE, dtype=dtype)
        self.norms = [(torch.ones(HIDDEN), torch.zeros(HIDDEN)) for _ in range(3)]
        self.activation = ActivationCode.GELU
        self.is_gated = False
        self.distances: Tensor | None = None
        """What is added to scores, float32 [HEADS, 2 * longest - 1]."""

    def run(self, lengths: list[int]) -> list[Tensor]:
        """The hidden states of prompts of these lengths, of tokens 0, 1, 2, ..."""
        pool = compiled.thread_pool()
        pack = pack_for_amx if self.use_amx else pack_matrix
        matrices: list[PackedMatrix] = [pack(pool, x) for x in (self.qkv, self.output, self.up, self.down)]
        qkv, output, up, down = (matrix.args() for matrix in matrices)
        zeros = torch.zeros(max(lengths), HIDDEN)
        norms = [pack_norm(NormCode.LAYER, weight, bias, EPSILON) for weight, bias in self.norms]
        first, second, third = (norm.args() for norm in norms)
        layers = (EncoderLayerArgs * 1)(EncoderLayerArgs(qkv, output, second, up, down, third))
        sizes = (HIDDEN, INTERMEDIATE, 1, HEADS, self.activation, self.is_gated)
        addresses = (self.words.data_ptr(), zeros.data_ptr(), zeros.data_ptr(), None, None)
        distances = DistanceScoresArgs()
        if self.distances is not None:
            padded = pad(self.distances * (HIDDEN // HEADS) ** 0.5, (0, PADDING))
            distances = DistanceScoresArgs(padded.data_ptr(), padded.shape[1], self.distances.shape[1] // 2)
        arguments = EncoderModelArgs(*sizes, *addresses, first, distances, layers)
        encoder = Encoder(pool, self.dtype, arguments, use_amx=self.use_amx)
        token_ids = torch.arange(sum(lengths))
        prompts = [part.tolist() for part in torch.split(token_ids, lengths)]
        return list(torch.split(encoder(prompts, None, token_ids.numpy()), lengths))

    def norm(self, x: Tensor, place: int) -> Tensor:
        weight, bias = self.norms[place]
        return layer_norm(x, (HIDDEN,), weight.double(), bias.double(), EPSILON)

    def embedded(self, lengths: list[int]) -> list[Tensor]:
        """What each prompt's layer reads, float64."""
        return [self.norm(part, 0) for part in torch.split(self.words.double(), lengths)]


def assert_all_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for states, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(states.double(), exact, rtol=tolerance, atol=tolerance)


def test_layer_norm(use_amx: bool) -> None:
    torch.manual_seed(0)
    layer = OneLayer(torch.float32, use_amx, 100)
    layer.words *= torch.logspace(-2, 3, 100)[:, None]
    layer.words += 10
    layer.norms = [(torch.randn(HIDDEN), torch.randn(HIDDEN)) for _ in range(3)]
    [states] = layer.embedded([100])
    assert_all_close(layer.run([100]), [layer.norm(layer.norm(states, 1), 2)], 1e-4)


def attending(dtype: torch.dtype, use_amx: bool) -> OneLayer:
    """A layer whose MLP is zero."""
    layer = OneLayer(dtype, use_amx, sum(LENGTHS))
    layer.qkv = (torch.randn(3 * HIDDEN, HIDDEN) / 6).to(dtype)
    layer.output = (torch.eye(HIDDEN) * 4).to(dtype)  # attention weighs more than the states that it is added to
    return layer


def attended(layer: OneLayer) -> list[Tensor]:
    """The hidden states of prompts of all LENGTHS, float64."""
    expected = []
    for states in layer.embedded(LENGTHS):
        projected = linear(states, layer.qkv.double()).view(len(states), 3, HEADS, HIDDEN // HEADS)
        query, key, value = projected.permute(1, 2, 0, 3)
        added = None
        if layer.distances is not None:
            places = torch.arange(len(states))
            added = layer.distances.double()[:, places - places[:, None] + layer.distances.shape[1] // 2]
        output = scaled_dot_product_attention(query, key, value, added).transpose(0, 1).flatten(1)
        expected.append(layer.norm(layer.norm(states + 4 * output, 1), 2))
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_token_sees_all_tokens_of_its_prompt(dtype: torch.dtype, use_amx: bool) -> None:
    torch.manual_seed(0)
    layer = attending(dtype, use_amx)
    assert_all_close(layer.run(LENGTHS), attended(layer), TOLERANCES[dtype, use_amx and dtype == torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_depend_on_distances(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = attending(dtype, use_amx=False)
    layer.distances = torch.randn(HEADS, 2 * max(LENGTHS) - 1)
    assert_all_close(layer.run(LENGTHS), attended(layer), TOLERANCES[dtype, False])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations(activation: ActivationCode, dtype: torch.dtype, use_amx: bool) -> None:
    torch.manual_seed(0)
    layer = OneLayer(dtype, use_amx, 70)
    layer.activation = activation
    layer.up = torch.randn(INTERMEDIATE, HIDDEN).to(dtype)  # about [-20, 20]
    layer.down = (torch.randn(HIDDEN, INTERMEDIATE) / 4).to(dtype)
    [states] = layer.embedded([70])
    states = layer.norm(states, 1)
    widened = ACTIVATIONS[activation](linear(states, layer.up.double()))
    expected = layer.norm(states + linear(widened, layer.down.double()), 2)
    assert_all_close(layer.run([70]), [expected], TOLERANCES[dtype, use_amx and dtype == torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate(dtype: torch.dtype, use_amx: bool) -> None:
    """Sixteen outputs of the gate and the same of up stand side by side in its weight."""
    torch.manual_seed(0)
    layer = OneLayer(dtype, use_amx, 70)
    layer.is_gated = True
    gate, up = torch.randn(2, INTERMEDIATE, HIDDEN).to(dtype) / 4
    layer.up = torch.stack([gate.view(-1, 16, HIDDEN), up.view(-1, 16, HIDDEN)], 1).reshape(-1, HIDDEN)
    layer.down = (torch.randn(HIDDEN, INTERMEDIATE) / 4).to(dtype)
    [states] = layer.embedded([70])
    states = layer.norm(states, 1)
    widened = gelu(linear(states, gate.double())) * linear(states, up.double())
    expected = layer.norm(states + linear(widened, layer.down.double()), 2)
    assert_all_close(layer.run([70]), [expected], TOLERANCES[dtype, use_amx and dtype == torch.float32])


def test_an_empty_prompt_is_refused(use_amx: bool) -> None:
    with pytest.raises(ValueError, match="prompts: must have no empty prompt"):
        OneLayer(torch.float32, use_amx, 4).run([3, 0, 1])


def test_amx_is_refused_on_a_processor_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire_kernels.cpu.encoder, "has_amx", lambda _: False)
    with pytest.raises(ValueError, match="use_amx: must be false on a processor without AMX"):
        OneLayer(torch.float32, True, 4).run([4])


def test_amx_is_refused_with_scores_by_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire_kernels.cpu.encoder, "has_amx", lambda _: True)
    arguments = EncoderModelArgs(distances=DistanceScoresArgs(of_heads=1))
    with pytest.raises(ValueError, match="use_amx: must be false with scores by distances"):
        Encoder(compiled.thread_pool(), torch.float32, arguments, use_amx=True)
