"""LlamaIndex's OpenAILike: function calling and structured prediction."""

import openai
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from checks import BASE_URL, MODEL, QUESTION, WEATHER, Forecast, WeatherQuery, check, error_of, get_weather, run


def connect(structured_outputs: bool = False, temperature: float = 0) -> OpenAILike:
    """The model, with or without the use of response_format."""
    return OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key="none",
        context_window=2048,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=structured_outputs,
        temperature=temperature,
        max_tokens=128,
        max_retries=0,
        timeout=600,
    )


model = connect()
tool = FunctionTool.from_defaults(get_weather)
prompt = PromptTemplate("{question}")


def check_calls(calls: list[ToolSelection]) -> None:
    """Asserts that there is a call, and that each has valid arguments."""
    assert calls
    for call in calls:
        assert call.tool_name == "get_weather"
        assert call.tool_id
        WeatherQuery.model_validate(call.tool_kwargs)


@check
def a_required_tool_is_called() -> None:
    response = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    check_calls(model.get_tool_calls_from_response(response))


@check
def a_named_tool_is_called() -> None:
    response = model.chat_with_tools([tool], user_msg=QUESTION, tool_choice="get_weather")
    check_calls(model.get_tool_calls_from_response(response))


@check
def a_streamed_call_is_assembled() -> None:
    *_, last = model.stream_chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    check_calls(model.get_tool_calls_from_response(last))


@check
async def the_asynchronous_client_calls_the_tool_and_returns_its_result() -> None:
    response = await model.apredict_and_call([tool], user_msg=QUESTION, tool_required=True)
    assert WEATHER in response.response


@check
def a_turn_with_a_result_of_a_tool_is_answered() -> None:
    response = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    call = model.get_tool_calls_from_response(response)[0]
    history = [
        ChatMessage(role=MessageRole.USER, content=QUESTION),
        response.message,
        ChatMessage(role=MessageRole.TOOL, content=WEATHER, additional_kwargs={"tool_call_id": call.tool_id}),
    ]
    assert model.chat(history).message.content


@check
def structured_prediction_by_function_calling() -> None:
    assert isinstance(model.structured_predict(Forecast, prompt, question=QUESTION), Forecast)


@check
def structured_prediction_by_response_format() -> None:
    structured = connect(structured_outputs=True)
    assert isinstance(structured.structured_predict(Forecast, prompt, question=QUESTION), Forecast)


@check
def structured_prediction_is_streamed() -> None:
    *parts, last = connect(structured_outputs=True).stream_structured_predict(Forecast, prompt, question=QUESTION)
    assert parts
    assert isinstance(last, Forecast)


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    error = error_of(openai.BadRequestError, lambda: model.complete(QUESTION, top_p=7))
    assert (error.code, error.param) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()
