"""smolagents: structured output and errors of its model."""

import openai
from smolagents import OpenAIModel
from smolagents.models import ChatMessage, MessageRole

from checks import BASE_URL, MODEL, QUESTION, Forecast, check, error_of, run

model = OpenAIModel(
    MODEL, api_base=BASE_URL, api_key="none", client_kwargs={"max_retries": 0}, temperature=0, max_tokens=128
)
MESSAGES = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]


@check
def response_format_takes_a_json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": Forecast.model_json_schema()}}
    Forecast.model_validate_json(str(model.generate(MESSAGES, response_format=form).content))


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    error = error_of(openai.BadRequestError, lambda: model.generate(MESSAGES, top_p=7))
    assert (error.code, error.param) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()
