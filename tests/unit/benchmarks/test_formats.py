"""The benchmark of formats of weights: its steps on a small model, its table and its target."""

from pathlib import Path
from typing import Any

import llama_models
from benchmarks.formats import BATCHES, PROMPT, formats_section, formats_table, measure, targets
from benchmarks.quality import FORMATS
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import make_runner


def _case(**milliseconds: float) -> dict[str, Any]:
    return {"what": "decode, batch of 32", "ms": milliseconds}


def test_each_format_computes_each_kind_of_step(tmp_path: Path) -> None:
    directory = llama_models.save_model(tmp_path, llama_models.VARIANTS["llama"]())
    runners = {
        name: make_runner(directory, "compiled", weights=weights, num_blocks=64)
        for name, weights in (("bfloat16", MatrixFormat.PLAIN), ("w8a8", MatrixFormat.W8A8))
    }
    cases = list(measure(runners, (1, 2), rounds=3))
    assert [case["what"] for case in cases] == ["decode, batch of 1", "decode, batch of 2", f"prompt, {PROMPT} tokens"]
    assert all(case["ms"].keys() == runners.keys() and min(case["ms"].values()) > 0 for case in cases)
    table = formats_table({"formats": list(runners), "cases": cases})
    assert len(table.rows) == 3
    assert table.columns == ("step, ms", "bfloat16", "w8a8")


def test_the_target_is_about_formats_that_were_measured() -> None:
    assert 32 in BATCHES
    assert {"bfloat16", "w8a8"} <= FORMATS.keys()
    assert [one["holds"] for one in targets([_case(bfloat16=13, w8a8=10)])] == [True]
    assert [one["holds"] for one in targets([_case(bfloat16=12, w8a8=10)])] == [False]
    assert targets([_case(bfloat16=12, int8=10)]) == []


def test_the_large_model_has_its_own_table_and_bound() -> None:
    cases = [_case(bfloat16=13, w8a8=10)]
    (judged,) = targets(cases, "a large model: ", 1.4)
    assert (judged["what"].startswith("a large model: decode"), judged["holds"]) == (True, False)
    result = {
        "date": "2026-11-26",
        "commit": None,
        "machine": {"cores": 2, "processor": "P"},
        "model": "m",
        "rounds": 3,
        "formats": ["bfloat16"],
        "cases": [_case(bfloat16=12)],
        "large": {"title": "a large model", "formats": ["bfloat16", "w8a8"], "cases": cases},
        "targets": [judged],
    }
    assert "a large model:\n\n| step, ms | bfloat16 | w8a8 |" in formats_section(result)
