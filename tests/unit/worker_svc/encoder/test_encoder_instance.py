"""From settings to a worker that answers steps with embeddings."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from bert_models import CONTEXT, hidden_states, random_prompts, save_bert
from encoder_model import WORDS, encoder_tokenizer
from quire.worker.v1 import worker_pb2 as pb
from svc_common.settings import read_settings
from worker_service import new_sequence, scheduled, serving
from worker_svc.errors import StartupFailed
from worker_svc.load import load_model
from worker_svc.settings import WorkerSettings
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step
from worker_svc.step_runner import StepInstance

EMBEDDING = pb.ResultKind(embedding=pb.EmbeddingResult())


def load(directory: Path, *args: str, report: Callable[[str], None] = print) -> StepInstance:
    threads = ["--num-threads", str(torch.get_num_threads())]
    settings = ["--model", str(directory), "--dtype", "float32", *threads, *args]
    return load_model(read_settings(WorkerSettings, settings), report)


def test_it_describes_a_model_without_kv(tmp_path: Path) -> None:
    save_bert(tmp_path, max_tokens=40)
    limits = load(tmp_path).description.limits
    assert (limits.context_length, limits.num_blocks, limits.vocab_size) == (40, 0, len(WORDS))
    assert limits.max_step_tokens >= 40


def test_its_identity_changes_with_how_vectors_are_made(tmp_path: Path) -> None:
    directories = [tmp_path / pooling for pooling in ("mean", "cls")]
    for directory in directories:
        save_bert(directory, pooling=directory.name)
    mean, cls = (load(directory).description.fingerprint for directory in directories)
    assert mean != cls


def test_a_step_holds_the_longest_prompt(tmp_path: Path) -> None:
    save_bert(tmp_path)
    limits = load(tmp_path, "--max-step-tokens", "8", "--max-sequences", "3").description.limits
    assert (limits.max_step_tokens, limits.max_sequences) == (CONTEXT, 3)
    assert load(tmp_path, "--max-model-len", "9").description.limits.context_length == 9


@pytest.mark.parametrize(
    ("setting", "value"), [("quantization", "int8"), ("drafter", "ngram"), ("kernels", "compiled")]
)
def test_settings_of_decoders_have_no_effect_and_are_named(setting: str, value: str, tmp_path: Path) -> None:
    save_bert(tmp_path)
    lines: list[str] = []
    load(tmp_path, f"--{setting}", value, report=lines.append)
    assert f"QUIRE_{setting.upper()} has no effect on an encoder" in lines


def test_a_limit_of_longer_models_has_no_effect(tmp_path: Path) -> None:
    save_bert(tmp_path)
    assert load(tmp_path, "--max-model-len", str(CONTEXT + 1)).description.limits.context_length == CONTEXT


def test_in_deterministic_mode_each_prompt_is_computed_alone(tmp_path: Path) -> None:
    save_bert(tmp_path)
    prompts = random_prompts([5, 17, 17, CONTEXT])
    runner = load(tmp_path, "--deterministic", "true").runner

    def values(ids: list[int]) -> list[Sequence[float]]:
        new = [
            NewSequence(id_, prompts[id_], len(prompts[id_]), 0, SamplingParams(), result="embedding") for id_ in ids
        ]
        step = Step([], new, [ScheduledSequence(id_, 0, len(prompts[id_]), []) for id_ in ids])
        found = [result.value for result in runner.finish(runner.launch(step)).sequences]
        runner.reset()
        return found

    together = values([0, 1, 2, 3])
    assert together == [values([id_])[0] for id_ in range(4)]
    assert load(tmp_path).description.fingerprint != load(tmp_path, "--deterministic", "true").description.fingerprint


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    save_bert(tmp_path / "model")
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = encoder_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(other / "tokenizer.json"))
    with pytest.raises(StartupFailed, match="QUIRE_TOKENIZER"):
        load(tmp_path / "model", "--tokenizer", str(other))


def test_a_checkpoint_with_other_parts_is_refused(tmp_path: Path) -> None:
    save_bert(tmp_path, num_hidden_layers=4)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 4', '"num_hidden_layers": 3'))
    with pytest.raises(StartupFailed, match=r"encoder\.layer\.3"):
        load(tmp_path)


async def test_steps_over_the_wire(tmp_path: Path) -> None:
    model = save_bert(tmp_path)
    prompts = random_prompts([3, 17])
    cls = pb.EmbeddingResult(pooling=pb.POOLING_CLS, num_dimensions=5, normalization=pb.NORMALIZATION_NONE)
    async with serving() as worker:
        worker.service.serve(load(tmp_path))
        [computed] = (await worker.stub.Describe(pb.DescribeRequest())).computed_results
        assert computed.result.WhichOneof("kind") == "embedding"
        assert computed.computation == pb.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV
        stream = await worker.open()
        new = [
            new_sequence(1, prompts[0], result=EMBEDDING),
            new_sequence(2, prompts[1], result=pb.ResultKind(embedding=cls)),
            new_sequence(3, prompts[0]),
        ]
        await stream.send(1, new_sequences=new, scheduled=scheduled((3, 0, 3), (1, 0, 3), (2, 0, 17)))
        result = (await stream.receive()).result
    assert [(one.schedule_index, one.message) for one in result.failures] == [(0, "an encoder does not compute tokens")]
    assert [value.schedule_index for value in result.values] == [1, 2]
    mean = torch.nn.functional.normalize(hidden_states(model, prompts[0]).mean(0), dim=0)
    assert list(result.values[0].value.numbers) == pytest.approx(mean.tolist(), abs=1e-5)
    first = hidden_states(model, prompts[1])[0][:5]
    assert list(result.values[1].value.numbers) == pytest.approx(first.tolist(), abs=1e-5)
