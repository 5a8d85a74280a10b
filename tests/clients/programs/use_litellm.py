"""LiteLLM: structured output, and streams that are assembled."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download of prices

import litellm

from checks import (
    BAD_SCHEMA,
    BASE_URL,
    CHAT,
    GREEDY,
    MODEL,
    Forecast,
    check,
    error_of,
    run,
)

REQUEST: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": "none",
    "messages": CHAT,
    "num_retries": 0,
    **GREEDY,
}


@check
def response_format_takes_a_model() -> None:
    answer = litellm.completion(response_format=Forecast, **REQUEST)
    assert answer.choices[0].finish_reason == "stop"
    Forecast.model_validate_json(answer.choices[0].message.content)


@check
def a_streamed_structure_is_assembled() -> None:
    chunks = list(litellm.completion(response_format=Forecast, stream=True, **REQUEST))
    assert len(chunks) > 2
    Forecast.model_validate_json(litellm.stream_chunk_builder(chunks).choices[0].message.content)


@check
def a_schema_that_cannot_be_compiled_is_a_bad_request() -> None:
    error = error_of(litellm.BadRequestError, lambda: litellm.completion(response_format=BAD_SCHEMA, **REQUEST))
    assert "response_format.json_schema" in str(error)


if __name__ == "__main__":
    run()
