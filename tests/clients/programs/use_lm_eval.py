"""lm-evaluation-harness: tasks by /v1/completions have the figures that transformers has with the same model files.

The server must compute in float32, as the reference does.
"""

import json
import math
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from checks import BASE_URL, MODEL, check, run

FOLDER = tempfile.TemporaryDirectory()
FILES = os.environ["QUIRE_MODEL_FILES"]
TOLERANCE = 1e-3
"""Of a text's log-probability, absolute and relative: sums of float32 in another order."""

CAPITALS = {
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
}


def documents() -> list[dict[str, Any]]:
    """A document for each country. The choices are its capital and the next three, in the order of the alphabet."""
    cities = list(CAPITALS.values()) * 2
    rows = []
    for index, (country, capital) in enumerate(CAPITALS.items()):
        choices = sorted(cities[index : index + 4])
        rows.append({"country": country, "capital": capital, "choices": choices, "answer": choices.index(capital)})
    return rows


CONTINUED = {"doc_to_text": "The capital of {{country}} is", "doc_to_target": " {{capital}}"}
METRICS: dict[str, list[str]] = {
    "choices": ["acc", "acc_norm"],
    "words": ["acc", "perplexity"],
    "texts": ["word_perplexity", "bits_per_byte"],
    "answers": ["exact_match"],
}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: What is the capital of {{country}}?\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    },
    "words": {"output_type": "loglikelihood", **CONTINUED},
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "The capital of {{country}} is {{capital}}. It is a large city.",
    },
    "answers": {
        "output_type": "generate_until",
        **CONTINUED,
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0},
    },
}


def write_tasks(folder: Path) -> TaskManager:
    """Writes the documents and a file of each task; returns what finds them."""
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in documents()))
    loading = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    source = {"dataset_path": "json", "dataset_kwargs": loading, "test_split": "test"}
    for name, task in TASKS.items():
        metrics = {"metric_list": [{"metric": metric} for metric in METRICS[name]]}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task, **metrics}))  # JSON is YAML
    return TaskManager(include_path=str(folder), include_defaults=False)


def by_completions(**options: Any) -> LM:
    """lm_eval's client of /v1/completions."""
    connection = {"base_url": f"{BASE_URL}/completions", "model": MODEL, "max_retries": 1}
    return LocalCompletionsAPI(**{**connection, "tokenizer_backend": "huggingface", "tokenizer": FILES, **options})


manager = write_tasks(Path(FOLDER.name))
served = by_completions()
reference = HFLM(pretrained=FILES, dtype="float32", device="cpu", batch_size=1)


def evaluate(model: LM, task: str) -> tuple[dict[str, float], list[Any]]:
    """The figures of a task, and what the model answered for each document."""
    outcome: Any = lm_eval.simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0)
    figures = {name: outcome["results"][task][f"{name},none"] for name in METRICS[task]}
    samples = sorted(outcome["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return figures, [sample["filtered_resps"] for sample in samples]


@cache
def expected(task: str) -> tuple[dict[str, float], list[Any]]:
    """The reference's figures and answers."""
    return evaluate(reference, task)


def check_close(got: Any, wanted: Any) -> None:
    """Asserts that values are equal; numbers with a fraction, as far as float32 is exact."""
    if isinstance(wanted, list | tuple):
        for ours, theirs in zip(got, wanted, strict=True):
            check_close(ours, theirs)
    elif isinstance(wanted, float):
        assert math.isclose(got, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE), f"{got} is not {wanted}"
    else:
        assert got == wanted, f"{got!r} is not {wanted!r}"


def check_task(task: str, model: LM = served) -> None:
    """Asserts that a task has the reference's answers and figures."""
    figures, answers = evaluate(model, task)
    expected_figures, expected_answers = expected(task)
    assert len(expected_answers) == len(CAPITALS)
    check_close(answers, expected_answers)
    check_close(list(figures.values()), list(expected_figures.values()))


@check
def choices_have_the_log_probabilities_of_transformers() -> None:
    check_task("choices")


@check
def words_have_the_log_probabilities_of_transformers() -> None:
    check_task("words")


@check
def texts_have_the_log_probabilities_of_transformers() -> None:
    check_task("texts")


@check
def greedy_texts_are_those_of_transformers() -> None:
    check_task("answers")


@check
def prompts_may_be_texts_in_batches() -> None:
    check_task("words", by_completions(batch_size=4, tokenized_requests=False))


@check
def requests_may_be_concurrent() -> None:
    check_task("answers", by_completions(num_concurrent=4))


@check
def the_tokenizer_of_the_server_is_that_of_the_files() -> None:
    remote = by_completions(tokenizer_backend="remote", tokenizer=None)
    texts = [f"The capital of {country} is {capital}.\n" for country, capital in CAPITALS.items()]
    assert [remote.tok_encode(text) for text in texts] == [served.tok_encode(text) for text in texts]
    assert remote.eos_string == served.eos_string


if __name__ == "__main__":
    run()
