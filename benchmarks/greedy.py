"""Measures decode steps of greedy requests with few logits and with all of them (`make bench-greedy`).

    python -m benchmarks.greedy [--rounds 60] [--output FILE]

This process loads the default model in bfloat16 twice, once without bounds of its logits (docs/design/cpu.md). For each
number of sequences, both compute the same steps in turns. Then transformers continues prompts of the mix, and bounds of
the logits of each new token are computed with torch: how many panels of the head they leave.
"""

from collections.abc import Iterable
from itertools import count
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.formats import BATCHES, MOST_ROUNDS, load_format, measure_decodes
from benchmarks.mix import PATH as MIX
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance
from benchmarks.report import Cells, origin
from benchmarks.runner import failures_exit, make_parser, publish
from quire_client.bench.mix import read_mix
from quire_kernels.cpu.head_bounds import rotate, rotation_for
from quire_kernels.cpu.linear import PANEL
from svc_common.models import resolve_model
from worker_svc.instance import ModelInstance
from worker_svc.model import compiled_builder
from worker_svc.model.compiled_builder import can_bound_head
from worker_svc.model.description_cache import description_of

RESULT = RESULTS / "greedy.json"
_NUM_PROMPTS, _NUM_TOKENS = 16, 24
_ALL, _FEW = "all logits", "few logits"


def _load(*, bounded: bool) -> ModelInstance:
    if bounded:
        return load_format("bfloat16")
    with patch.object(compiled_builder, "multiplies_bytes", lambda: False):
        return load_format("bfloat16")


def final_states(prompts: Iterable[Iterable[int]]) -> tuple[Tensor, Tensor]:
    """What the head of the default model is multiplied by for each new token of these prompts, and its weight, float32
    [tokens, hidden] and [vocab, hidden].
    """
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(None).path, dtype=torch.bfloat16)
    states = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(ids, max_new_tokens=_NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        states.append(model.model(out).last_hidden_state[0, ids.shape[1] - 1 : -1])
    return torch.cat(states).float(), model.lm_head.weight.float()


def panels_left(states: Tensor, head: Tensor, rotation: Tensor) -> Tensor:
    """How many panels have a bound that is not below the largest logit, int64 [tokens]: see `csrc/logit_bounds.h`."""
    rows, weights = (rotate(each, rotation) for each in (states, head))
    coded_rows, codes = _rounded(rows), _rounded(weights)
    row_errors, errors = ((each - coded).norm(dim=1) for each, coded in ((rows, coded_rows), (weights, codes)))
    bounds = coded_rows @ codes.t() + row_errors[:, None] * weights.norm(dim=1)
    bounds += (rows.norm(dim=1) + row_errors)[:, None] * errors
    bounds = torch.nn.functional.pad(bounds, (0, -len(head) % PANEL), value=-torch.inf)
    known = (states @ head.t()).amax(1)
    return (bounds.view(len(states), -1, PANEL).amax(2) >= known[:, None]).sum(1)


def _rounded(rows: Tensor) -> Tensor:
    """Each row in 255 steps."""
    steps = rows.abs().amax(1, keepdim=True) / 127
    return (rows / steps).round() * steps


def _measure_panels() -> dict[str, Any]:
    with torch.inference_mode():
        states, head = final_states(request.prompt_token_ids for request in read_mix(MIX)[:_NUM_PROMPTS])
        rotations = {"rotated": rotation_for(head.shape[1]), "as they are": torch.ones(1, 1)}
        left = {name: panels_left(states, head, rotation).tolist() for name, rotation in rotations.items()}
    return {
        "of": -(-len(head) // PANEL),
        "tokens": len(states),
        "left": {name: fmean(found) for name, found in left.items()},
    }


def greedy_table(result: dict[str, Any]) -> Cells:
    """A row for each number of sequences."""
    rows = [
        [
            case["what"],
            f"{case['ms'][_ALL]:.2f}",
            f"{case['ms'][_FEW]:.2f}",
            f"{case['ms'][_FEW] / case['ms'][_ALL]:.2f}",
        ]
        for case in result["cases"]
    ]
    return Cells(("step", f"{_ALL}, ms", f"{_FEW}, ms", "ratio"), rows)


def greedy_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    panels = result["panels"]
    left = ", ".join(f"{mean:.1f} where rows and weights are {name}" for name, mean in panels["left"].items())
    return (
        f"Median of {result['rounds']} steps each, in turns; {origin(result)}.\n\n{greedy_table(result).markdown()}\n\n"
        f"Of {panels['of']:,} panels, bounds leave on average, for {panels['tokens']} tokens of the mix: {left}."
    )


def main() -> None:
    parser = make_parser(__doc__, RESULT)
    parser.add_argument("--rounds", type=int, default=60, help=f"steps of each, {MOST_ROUNDS} at most; default 60")
    options = parser.parse_args()
    with failures_exit("greedy"):
        description = description_of(resolve_model(None).path)
        if description is None or not can_bound_head(description):
            raise BenchmarkFailed(
                "this processor multiplies bytes no faster than other numbers: all logits are computed"
            )
        rounds = min(options.rounds, MOST_ROUNDS)
        runners = {_ALL: _load(bounded=False).runner, _FEW: _load(bounded=True).runner}
        cases = list(measure_decodes(runners, BATCHES, rounds, count()))
        result = {**provenance("torch"), "rounds": rounds, "cases": cases, "panels": _measure_panels()}
    publish(result, options.output or RESULT, {"Greedy steps": greedy_table(result)})


if __name__ == "__main__":
    main()
