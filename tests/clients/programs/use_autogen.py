"""AutoGen: the model client's structured output, and an assistant agent."""

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import StructuredMessage
from autogen_core.models import (
    ModelFamily,
    ModelInfo,
    UserMessage,
)
from autogen_ext.models.openai import OpenAIChatCompletionClient

from checks import BASE_URL, MODEL, QUESTION, Forecast, check, error_of, run

info = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    structured_output=True,
    family=ModelFamily.UNKNOWN,
    multiple_system_messages=True,
)
client = OpenAIChatCompletionClient(
    model=MODEL, base_url=BASE_URL, api_key="none", model_info=info, temperature=0, max_tokens=128, max_retries=0
)
asked = [UserMessage(content=QUESTION, source="user")]


@check
async def structured_output_is_valid() -> None:
    result = await client.create(asked, json_output=Forecast)
    assert isinstance(result.content, str)
    Forecast.model_validate_json(result.content)


@check
async def an_agent_responds_with_a_structure() -> None:
    agent = AssistantAgent("forecaster", model_client=client, output_content_type=Forecast)
    message = (await agent.run(task=QUESTION)).messages[-1]
    assert isinstance(message, StructuredMessage)
    assert isinstance(message.content, Forecast)


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    hot = {"top_p": 7}
    error = error_of(openai.BadRequestError, lambda: client.create(asked, extra_create_args=hot))
    assert (error.code, error.param) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()
