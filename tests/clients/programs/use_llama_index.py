"""LlamaIndex's OpenAILike: structured prediction."""

import openai
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike

from checks import BASE_URL, MODEL, QUESTION, Forecast, check, error_of, run

model = OpenAILike(
    model=MODEL,
    api_base=BASE_URL,
    api_key="none",
    context_window=2048,
    is_chat_model=True,
    should_use_structured_outputs=True,
    temperature=0,
    max_tokens=128,
    max_retries=0,
    timeout=600,
)
prompt = PromptTemplate("{question}")


@check
def structured_prediction_by_response_format() -> None:
    assert isinstance(model.structured_predict(Forecast, prompt, question=QUESTION), Forecast)


@check
def structured_prediction_is_streamed() -> None:
    *parts, last = model.stream_structured_predict(Forecast, prompt, question=QUESTION)
    assert parts
    assert isinstance(last, Forecast)


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    error = error_of(openai.BadRequestError, lambda: model.complete(QUESTION, top_p=7))
    assert (error.code, error.param) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()
