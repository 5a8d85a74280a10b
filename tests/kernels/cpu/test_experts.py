"""Mixtures of experts by compiled code, against float64 token by token."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import compiled
from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.amx import has_amx, pack_for_amx
from quire_kernels.cpu.experts import ExpertScoring, PackedExperts, compute_experts
from quire_kernels.cpu.linear import MatrixArgs, MatrixFormat, PackedMatrix, pack_matrix
from random_decoder import swiglu_oai

LANES = 16
# The dtype, and whether products are computed by AMX
ARITHMETICS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "amx": (torch.bfloat16, True),
}


@dataclass(frozen=True)
class Weights:
    """The weights of some experts as a checkpoint has them, and their packed form."""

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    num_chosen: int
    normalized: bool
    shared: tuple[Tensor, Tensor, Tensor] | None
    use_amx: bool
    scoring: ExpertScoring = ExpertScoring.SOFTMAX
    choice_bias: Tensor | None = None
    groups: tuple[int, int, int] | None = None
    activation: ActivationCode = ActivationCode.SILU
    biases: tuple[Tensor, ...] | None = None
    """float32, of the router, and of each expert's gate, up and down."""
    weight_scales: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return len(self.gate)

    def packed(self, matrix_format: MatrixFormat = MatrixFormat.PLAIN) -> PackedExperts:
        pool = compiled.thread_pool()
        pack = pack_for_amx if self.use_amx else pack_matrix
        pack_experts = partial(pack, matrix_format=matrix_format)

        def mlp(
            gate: Tensor, up: Tensor, down: Tensor, biases: tuple[Tensor, ...] | None = None
        ) -> tuple[PackedMatrix, PackedMatrix]:
            if biases is None:
                return pack_experts(pool, _interleaved(gate, up)), pack_experts(pool, down)
            of_both = _interleaved(*(bias[:, None] for bias in biases[:2]))[:, 0]
            return pack_experts(pool, _interleaved(gate, up), of_both), pack_experts(pool, down, biases[2])

        experts = [
            mlp(*matrices, None if self.biases is None else tuple(bias[number] for bias in self.biases[1:]))
            for number, matrices in enumerate(zip(self.gate, self.up, self.down, strict=True))
        ]
        return PackedExperts(
            pack(pool, self.router, None if self.biases is None else self.biases[0]),
            [gate_up for gate_up, _ in experts],
            [down for _, down in experts],
            self.num_chosen,
            self.normalized,
            1.5,
            self.activation,
            None if self.shared is None else mlp(*self.shared),
            self.scoring,
            self.choice_bias,
            self.groups,
            self.weight_scales,
        )

    def expected(self, inputs: Tensor) -> Tensor:
        """Float64, token by token."""

        def mlp(row: Tensor, gate: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
            gate_bias, up_bias, down_bias = biases or (0.0, 0.0, 0.0)
            gated, raised = gate.double() @ row + gate_bias, up.double() @ row + up_bias
            oai = self.activation is ActivationCode.SWIGLU_OAI
            product: Tensor = down.double() @ (swiglu_oai(gated, raised) if oai else silu(gated) * raised)
            return product + down_bias

        rows = []
        for row in inputs.double():
            scores = self.router.double() @ row
            if self.biases is not None:
                scores += self.biases[0]
            weights, chosen = self._choose(scores[: self.num_experts])
            if self.normalized:
                weights /= weights.sum()
            if self.weight_scales is not None:
                weights = weights * self.weight_scales[chosen]
            total = torch.zeros_like(row)
            for weight, e in zip(weights * 1.5, chosen, strict=True):
                total += weight * mlp(
                    row, self.gate[e], self.up[e], self.down[e], *(bias[e] for bias in (self.biases or ())[1:])
                )
            if self.shared is not None:
                factor = scores[self.num_experts].sigmoid() if len(self.router) > self.num_experts else 1.0
                total += factor * mlp(row, *self.shared)
            rows.append(total)
        return torch.stack(rows) if rows else torch.empty(inputs.shape, dtype=torch.float64)

    def chosen(self, inputs: Tensor) -> Tensor:
        """[rows, num_chosen]"""
        scores = inputs.double() @ self.router[: self.num_experts].double().t()
        return torch.stack([self._choose(row)[1] for row in scores])

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and numbers of one token's experts."""
        weights = scores.softmax(-1) if self.scoring is ExpertScoring.SOFTMAX else scores.sigmoid()
        ranks = weights if self.choice_bias is None else weights + self.choice_bias
        if self.groups is not None:
            count, num_chosen, num_summed = self.groups
            grouped = ranks.view(count, -1)
            best = grouped.topk(num_summed).values.sum(-1).topk(num_chosen).indices.tolist()
            outside = [group for group in range(count) if group not in best]
            ranks = grouped.index_fill(0, torch.tensor(outside, dtype=torch.int64), float("-inf")).flatten()
        chosen = ranks.topk(self.num_chosen).indices
        return weights[chosen], chosen


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    padded = [torch.nn.functional.pad(part, (0, 0, 0, -len(part) % (2 * LANES))) for part in (gate, up)]
    return torch.stack([part.view(-1, LANES, part.shape[1]) for part in padded], 1).flatten(0, 2)


def _weights(
    arithmetic: str = "float32",
    *,
    num_experts: int = 6,
    num_chosen: int = 2,
    hidden: int = 48,
    width: int = 40,
    normalized: bool = True,
    shared: int = 0,
    gate: bool = False,
    scoring: ExpertScoring = ExpertScoring.SOFTMAX,
    biased: bool = False,
    groups: tuple[int, int, int] | None = None,
    activation: ActivationCode = ActivationCode.SILU,
    with_biases: bool = False,
    scaled: bool = False,
) -> Weights:
    dtype, use_amx = ARITHMETICS[arithmetic]
    if use_amx and not has_amx(compiled.thread_pool()):
        pytest.skip("needs AMX")
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)

    beside = (random(shared, hidden), random(shared, hidden), random(hidden, shared)) if shared else None
    return Weights(
        random(num_experts + gate, hidden) * 4,
        random(num_experts, width, hidden),
        random(num_experts, width, hidden),
        random(num_experts, hidden, width),
        num_chosen,
        normalized,
        beside,
        use_amx,
        scoring,
        torch.randn(num_experts, generator=generator) if biased else None,
        groups,
        activation,
        tuple(torch.randn(num_experts, *sizes, generator=generator) for sizes in ((), (width,), (width,), (hidden,)))
        if with_biases
        else None,
        torch.randn(num_experts, generator=generator) if scaled else None,
    )


def _inputs(rows: int, weights: Weights) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, weights.router.shape[1], generator=generator).to(weights.router.dtype)


def _compute(inputs: Tensor, packed: PackedExperts, weights: Weights, num_threads: int = 2) -> Tensor:
    return compute_experts(compiled.thread_pool(num_threads), inputs, packed.args(), use_amx=weights.use_amx)


def _assert_near(computed: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    # What is between the two products is rounded to the dtype.
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(computed.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 33, 100])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"normalized": False, "shared": 50, "gate": True},
        {"shared": 17},
        {"num_experts": 1, "num_chosen": 1},
        {"num_experts": 70, "num_chosen": 5, "hidden": 54, "width": 83},
        {"num_experts": 4, "num_chosen": 4, "width": 300, "hidden": 128},
        {"num_experts": 20, "num_chosen": 4, "groups": (5, 2, 1), "normalized": False},
        {"num_experts": 24, "num_chosen": 5, "groups": (4, 2, 2), "scoring": ExpertScoring.SIGMOID, "biased": True},
        {"num_experts": 7, "scoring": ExpertScoring.SIGMOID, "shared": 17},
        {"num_experts": 19, "biased": True},
        {"num_experts": 3, "width": 1024, "hidden": 2048, "shared": 32},
        {"with_biases": True, "activation": ActivationCode.SWIGLU_OAI},
        {"num_experts": 19, "num_chosen": 4, "scaled": True},
        {"num_experts": 33, "num_chosen": 4, "hidden": 90, "width": 90, "with_biases": True},
    ],
    ids=str,
)
def test_outputs(form: dict[str, Any], rows: int, arithmetic: str) -> None:
    weights = _weights(arithmetic, **form)
    inputs = _inputs(rows, weights)
    _assert_near(_compute(inputs, weights.packed(), weights), weights.expected(inputs), inputs.dtype)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_one_expert_may_have_all_tokens_and_others_none(arithmetic: str) -> None:
    weights = _weights(arithmetic)
    inputs = _inputs(50, weights)
    # Scores of the same sign for all tokens
    inputs[:, 0] = 8.0
    router = weights.router.clone()
    router[:, 0] = torch.tensor([0, 9, 0, 0, 7, -9])
    weights = replace(weights, router=router)
    counts = weights.chosen(inputs).flatten().bincount(minlength=6).tolist()
    assert counts == [0, 50, 0, 0, 50, 0]
    _assert_near(_compute(inputs, weights.packed(), weights), weights.expected(inputs), inputs.dtype)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_weights_of_experts_without_tokens_are_not_read(arithmetic: str) -> None:
    """Their addresses are null: reading one would end the process."""
    weights = _weights(arithmetic, num_experts=12)
    inputs = _inputs(2, weights)
    packed, present = weights.packed(), weights.packed()
    absent = set(range(12)) - set(weights.chosen(inputs).flatten().tolist())
    assert len(absent) >= 8
    for matrices in (packed.args().gate_up, packed.args().down):
        for expert in absent:
            matrices[expert].panels = None
    assert torch.equal(_compute(inputs, packed, weights), _compute(inputs, present, weights))


@pytest.mark.parametrize("matrix_format", MatrixFormat)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_row_comes_to_the_same_bits_with_any_others_and_any_threads(
    arithmetic: str, matrix_format: MatrixFormat
) -> None:
    weights = _weights(arithmetic, num_experts=9, num_chosen=3, width=83, shared=33, gate=True, groups=(3, 2, 1))
    packed, inputs = weights.packed(matrix_format), _inputs(77, weights)
    together = _compute(inputs, packed, weights)
    for num_threads in (1, 3):
        assert torch.equal(_compute(inputs, packed, weights, num_threads), together)
    for first, end in ((0, 1), (7, 8), (3, 19), (20, 77)):
        assert torch.equal(_compute(inputs[first:end], packed, weights), together[first:end])
    backwards = _compute(inputs.flip(0), packed, weights).flip(0)
    assert torch.equal(backwards, together)


def test_of_equal_scores_the_lower_numbers_are_chosen() -> None:
    weights = replace(_weights(), router=torch.zeros(6, 48))
    inputs = _inputs(3, weights)
    first = replace(weights, router=torch.zeros(2, 48), gate=weights.gate[:2], up=weights.up[:2], down=weights.down[:2])
    _assert_near(_compute(inputs, weights.packed(), weights), first.expected(inputs), inputs.dtype)


def test_groups_and_the_bias_change_the_choice() -> None:
    """Otherwise the tests above would pass without them."""
    form: dict[str, Any] = {"num_experts": 24, "num_chosen": 5, "scoring": ExpertScoring.SIGMOID}
    weights = _weights(**form, groups=(4, 2, 2), biased=True)
    inputs = _inputs(9, weights)
    chosen = [
        each.chosen(inputs).sort().values.tolist()
        for each in (
            weights,
            replace(weights, groups=None),
            replace(weights, groups=(4, 2, 1)),
            replace(weights, choice_bias=None),
        )
    ]
    assert all(other != chosen[0] for other in chosen[1:])


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("choice_bias", {"choice_bias": torch.zeros(5)}),
        ("weight_scales", {"weight_scales": torch.zeros(6, dtype=torch.float64)}),
        ("groups", {"groups": (300, 1, 1)}),
    ],
)
def test_what_the_router_cannot_have_is_named(argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        replace(_weights(), **changes).packed()


@pytest.mark.parametrize(
    "form", [{}, {"num_experts": 24, "groups": (4, 2, 2), "scoring": ExpertScoring.SIGMOID, "biased": True}], ids=str
)
def test_a_row_that_is_not_finite_changes_no_other(form: dict[str, Any]) -> None:
    weights = _weights(**form)
    inputs = _inputs(9, weights)
    expected = _compute(inputs, weights.packed(), weights)
    inputs[4] = float("nan")
    computed = _compute(inputs, weights.packed(), weights)
    assert bool(computed[4].isnan().all())
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(computed[others], expected[others])


def test_products_in_8_bits_by_tile_registers_are_those_of_vectors() -> None:
    """Of experts with 12 rows and more. The router's scores are bfloat16's, whose bits differ."""
    weights = _weights("amx", num_experts=3, hidden=128, width=64)
    inputs, in_vectors = _inputs(90, weights), replace(weights, use_amx=False)
    found, expected = (_compute(inputs, each.packed(MatrixFormat.W8A8), each) for each in (weights, in_vectors))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("argument", "inputs", "use_amx"),
    [
        ("use_amx", torch.zeros(1, 48), True),
        ("dtype", torch.zeros(1, 48).half(), False),
        ("inputs", torch.zeros(1, 16), False),
        ("inputs", torch.zeros(1, 160), False),
        ("inputs", torch.zeros(48), False),
    ],
)
def test_a_wrong_argument_is_named(argument: str, inputs: Tensor, use_amx: bool) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        compute_experts(compiled.thread_pool(), inputs, _weights().packed().args(), use_amx=use_amx)


def test_structures_have_the_same_layout() -> None:
    packed = _weights(shared=17, gate=True).packed()
    assert packed.args().shared_down.outputs == 48
    assert packed.args().router.outputs == 7
    assert isinstance(packed.args().gate_up[5], MatrixArgs)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("down", {"down": []}),
        ("num_chosen", {"num_chosen": 7}),
        ("num_chosen", {"num_chosen": 0}),
        ("groups", {"groups": (4, 1, 1)}),
        ("groups", {"groups": (3, 4, 1)}),
        ("groups", {"groups": (3, 1, 3)}),
        ("groups", {"groups": (0, 0, 0)}),
    ],
    ids=str,
)
def test_counts_that_do_not_fit_six_experts_are_refused(argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        replace(_weights().packed(), **changes)


def test_a_router_with_another_number_of_outputs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^router: "):
        replace(_weights().packed(), router=pack_matrix(compiled.thread_pool(), torch.zeros(5, 48)))
