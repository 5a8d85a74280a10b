// The openai package of Node: parse, runTools, the stream helpers, and errors.
import assert from "node:assert/strict";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";

import { CHAT, check, Forecast, MODEL, run, WEATHER, WeatherQuery } from "./checks.mjs";

const client = new OpenAI({ maxRetries: 0 });
const chats = client.chat.completions;
const request = { model: MODEL, messages: CHAT, temperature: 0, max_tokens: 128 };
const oneCall = { ...request, parallel_tool_calls: false }; // a small model repeats a call until no further one is allowed
const forecast = zodResponseFormat(Forecast, "forecast");
const asked = { model: MODEL, input: CHAT[0].content, temperature: 0, max_output_tokens: 128 };
const text = { format: zodTextFormat(Forecast, "forecast") };

// The tool as the helpers take it. `asked` gets the arguments of each call.
function weatherTool(asked = []) {
  return zodFunction({
    name: "get_weather",
    description: "Weather of a city.",
    parameters: WeatherQuery,
    function: (query) => {
      asked.push(query);
      return WEATHER;
    },
  });
}

check("parse_returns_the_object", async () => {
  const { choices } = await chats.parse({ ...request, response_format: forecast });
  assert.equal(choices[0].finish_reason, "stop");
  Forecast.parse(choices[0].message.parsed);
});

check("parse_returns_the_arguments_of_a_strict_tool", async () => {
  const { choices } = await chats.parse({ ...oneCall, tools: [weatherTool()], tool_choice: "required" });
  assert.equal(choices[0].finish_reason, "tool_calls");
  assert.ok(choices[0].message.tool_calls.length >= 1);
  for (const call of choices[0].message.tool_calls) {
    assert.ok(call.id);
    WeatherQuery.parse(call.function.parsed_arguments);
  }
});

check("the_stream_helper_parses_content", async () => {
  const stream = chats.stream({ ...request, response_format: forecast });
  const deltas = [];
  stream.on("content.delta", ({ delta }) => deltas.push(delta));
  const { message } = (await stream.finalChatCompletion()).choices[0];
  assert.ok(deltas.length > 1);
  assert.equal(deltas.join(""), message.content);
  Forecast.parse(message.parsed);
});

check("the_stream_helper_assembles_calls", async () => {
  const stream = chats.stream({ ...oneCall, tools: [weatherTool()], tool_choice: "required" });
  const deltas = [];
  stream.on("tool_calls.function.arguments.delta", (delta) => deltas.push(delta));
  const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
  assert.equal(finish_reason, "tool_calls");
  assert.ok(message.tool_calls.length >= 1);
  message.tool_calls.forEach((call, index) => {
    const pieces = deltas.filter((delta) => delta.index === index).map((delta) => delta.arguments_delta);
    assert.ok(pieces.length > 1, "the arguments arrive at once");
    assert.equal(pieces.join(""), call.function.arguments);
    WeatherQuery.parse(call.function.parsed_arguments);
  });
});

for (const stream of [false, true]) {
  check(`run_tools_answers_after_a_call_${stream ? "in_a_stream" : "whole"}`, async () => {
    const asked = [];
    const named = { type: "function", function: { name: "get_weather" } };
    const runner = chats.runTools({ ...request, stream, tools: [weatherTool(asked)], tool_choice: named });
    await runner.done();
    assert.equal(asked.length, 1);
    WeatherQuery.parse(asked[0]);
    assert.equal(await runner.finalFunctionToolCallResult(), WEATHER);
  });
}

check("a_turn_with_a_result_of_a_tool_is_answered", async () => {
  const tools = [{ type: "function", function: weatherTool().function }];
  const first = await chats.create({ ...oneCall, tools, tool_choice: "required" });
  const { message } = first.choices[0];
  const results = message.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: WEATHER }));
  const messages = [...CHAT, message, ...results];
  const second = await chats.create({ ...request, messages, tools, tool_choice: "none" });
  assert.ok(second.choices[0].message.content);
});

check("a_response_is_parsed", async () => {
  const response = await client.responses.parse({ ...asked, text });
  Forecast.parse(response.output_parsed);
  assert.equal((await client.responses.retrieve(response.id)).output_text, response.output_text);
});

check("a_response_is_streamed_and_continues_after_an_event", async () => {
  const stream = client.responses.stream({ ...asked, text });
  const events = [];
  for await (const event of stream) events.push(event);
  const response = await stream.finalResponse();
  Forecast.parse(response.output_parsed);
  const rest = [];
  for await (const event of await client.responses.retrieve(response.id, { stream: true, starting_after: 5 })) {
    rest.push(event.sequence_number);
  }
  assert.deepEqual(rest, events.slice(6).map((_, index) => index + 6));
});

check("a_response_in_the_background_is_cancelled_and_deleted", async () => {
  const { id } = await client.responses.create({ ...asked, background: true });
  const ended = await client.responses.cancel(id);
  assert.ok(["cancelled", "completed", "incomplete"].includes(ended.status));
  const items = [];
  for await (const item of client.responses.inputItems.list(id)) items.push(item.content[0].text);
  assert.deepEqual(items, [asked.input]);
  await client.responses.delete(id);
  await assert.rejects(client.responses.retrieve(id), OpenAI.NotFoundError);
});

check("a_schema_that_cannot_be_compiled_is_a_bad_request", async () => {
  const bad = { type: "json_schema", json_schema: { name: "bad", schema: { type: "no such type" } } };
  await assert.rejects(chats.create({ ...request, response_format: bad }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "grammar_invalid");
    assert.match(error.param, /^response_format\.json_schema/);
    return true;
  });
});

await run();
