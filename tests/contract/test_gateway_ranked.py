"""best_of and beam search over the wire, with a scripted scheduler."""

from typing import Any

from gateway_harness import Harness, encoded
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import ScriptedSession, answer_with, length_end, stop_end
from tiny_model import EOS

DRAWS = [("he", -2.0), ("hello", -0.5), ("h", -1.0)]
NUM_DRAWN = sum(len(encoded(text)) for text, _ in DRAWS)


def draw(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
    """Every token of a text has the log-probability beside it."""
    assert submit.sampling.HasField("logprobs")
    session.accept(submit.key)
    for index, (text, logprob) in enumerate(DRAWS):
        token_ids = encoded(text)
        logprobs = [worker_v1.TokenLogprobs(logprob=logprob)] * len(token_ids)
        session.tokens(submit.key, token_ids, 0, index, logprobs=logprobs, end=length_end())


def search(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
    """The requested number of finished beams."""
    assert submit.beam_search.width == 4
    session.accept(submit.key)
    for index in range(submit.n):
        token_ids = [*encoded("he" + "l" * index), EOS]
        session.tokens(submit.key, token_ids, 0, index, end=stop_end(EOS), score=-1.0 - index)


async def generated(quire: Harness, **fields: Any) -> api.GenerateResponse:
    generation = api.Generation(text="a", **fields)
    return await quire.stub.Generate(api.GenerateRequest(generation=generation))


async def test_the_best_of_several_are_given_and_all_are_counted(quire: Harness) -> None:
    quire.scheduler.script = draw
    answer = await generated(quire, n=2, best_of=3)
    assert [(one.index, one.text, one.score) for one in answer.completions] == [(0, "hello", -0.5), (1, "h", -1.0)]
    assert not answer.completions[0].logprobs
    assert answer.usage.completion_tokens == NUM_DRAWN


async def test_the_best_of_several_are_choices(quire: Harness) -> None:
    quire.scheduler.script = draw
    body = {"prompt": "a", "n": 2, "best_of": 3}
    answer = (await quire.http.post("/v1/completions", json=body)).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "hello"), (1, "h")]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == NUM_DRAWN


async def test_prompts_are_ranked_each_by_itself(quire: Harness) -> None:
    quire.scheduler.script = draw
    body = {"prompt": ["a", "b"], "best_of": 3, "n": 2}
    answer = (await quire.http.post("/v1/completions", json=body)).json()
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(0, "hello"), (1, "h"), (2, "hello"), (3, "h")]


async def test_a_beam_search_is_given_as_it_comes(quire: Harness) -> None:
    quire.scheduler.script = search
    answer = await generated(quire, n=2, beam_search=api.BeamSearch(width=4))
    assert [(one.index, one.text, one.score) for one in answer.completions] == [(0, "he", -1.0), (1, "hel", -2.0)]
    assert {one.finish.reason for one in answer.completions} == {api.FINISH_REASON_STOP}


async def test_beams_are_choices(quire: Harness) -> None:
    quire.scheduler.script = search
    body = {"messages": [{"role": "user", "content": "a"}], "n": 2, "best_of": 4, "use_beam_search": True}
    answer = (await quire.http.post("/v1/chat/completions", json=body)).json()
    contents = [(choice["index"], choice["message"]["content"]) for choice in answer["choices"]]
    assert contents == [(0, "he"), (1, "hel")]


async def test_what_was_not_ranked_has_no_score(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"))
    assert not (await generated(quire)).completions[0].HasField("score")


async def test_n_without_best_of_may_be_streamed(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"))
    body = {"prompt": "a", "n": 2, "best_of": 2, "stream": True}
    assert (await quire.http.post("/v1/completions", json=body)).text.endswith("data: [DONE]\n\n")
    assert not quire.scheduler.all("submit")[0].sampling.HasField("logprobs")
