// The openai package of Node: chats with parse, runTools and the stream helpers, completions, responses, and errors.
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
const POLLED_MS = 120_000;

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

check("a_streamed_chat_has_the_text_of_a_whole_one", async () => {
  const whole = (await chats.create(request)).choices[0];
  const texts = [];
  let finish;
  for await (const { choices } of await chats.create({ ...request, stream: true })) {
    texts.push(choices[0].delta.content ?? "");
    finish = choices[0].finish_reason ?? finish;
  }
  assert.ok(texts.length > 2);
  assert.equal(texts.join(""), whole.message.content);
  assert.equal(finish, whole.finish_reason);
});

check("a_streamed_completion_has_the_text_and_the_usage_of_a_whole_one", async () => {
  const prompt = { model: MODEL, prompt: "One, two, three,", temperature: 0, max_tokens: 32 };
  const whole = await client.completions.create(prompt);
  const parts = [];
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const part of await client.completions.create({ ...prompt, ...options })) parts.push(part);
  const last = parts.pop();
  assert.ok(parts.length > 2);
  assert.equal(parts.map(({ choices }) => choices[0].text).join(""), whole.choices[0].text);
  assert.equal(parts.at(-1).choices[0].finish_reason, whole.choices[0].finish_reason);
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
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

check("a_response_in_the_background_is_polled_to_its_end", async () => {
  const whole = await client.responses.create(asked);
  let response = await client.responses.create({ ...asked, background: true });
  const limit = performance.now() + POLLED_MS;
  while (["queued", "in_progress"].includes(response.status)) {
    assert.ok(performance.now() < limit, response.status);
    await new Promise((resolve) => setTimeout(resolve, 100));
    response = await client.responses.retrieve(response.id);
  }
  assert.equal(response.status, whole.status);
  assert.equal(response.output_text, whole.output_text);
});

check("a_stream_of_the_background_continues_after_its_client_left", async () => {
  const events = [];
  for await (const event of await client.responses.create({ ...asked, background: true, stream: true })) {
    events.push(event);
    if (events.length === 6) break; // which closes the connection
  }
  const { type, response } = events[0];
  assert.equal(type, "response.created");
  assert.equal(response.status, "queued");
  const after = { stream: true, starting_after: events.at(-1).sequence_number };
  for await (const event of await client.responses.retrieve(response.id, after)) events.push(event);
  assert.deepEqual(
    events.map(({ sequence_number }) => sequence_number),
    events.map((_, index) => index),
  );
  assert.match(events.at(-1).type, /^response\.(completed|incomplete)$/);
  const deltas = events.filter((event) => event.type === "response.output_text.delta").map(({ delta }) => delta);
  assert.equal(deltas.join(""), (await client.responses.retrieve(response.id)).output_text);
});

check("errors_have_the_types_of_the_client_and_name_their_field", async () => {
  const refused = async (call, kind, code, param) =>
    assert.rejects(call, (error) => {
      assert.ok(error instanceof kind);
      assert.deepEqual([error.code, error.param], [code, param]);
      return true;
    });
  for (const stream of [false, true]) {
    const hot = { stream, temperature: 3 };
    for (const call of [
      () => chats.create({ ...request, ...hot }),
      () => client.completions.create({ model: MODEL, prompt: "a", ...hot }),
      () => client.responses.create({ ...asked, ...hot }),
    ]) {
      await refused(call(), OpenAI.BadRequestError, "invalid_field", "temperature");
    }
    const unstored = { ...asked, stream, background: true, store: false };
    await refused(client.responses.create(unstored), OpenAI.BadRequestError, "invalid_field", "background");
    const unknown = { ...asked, stream, previous_response_id: `resp_${"0".repeat(48)}` };
    const missing = client.responses.create(unknown);
    await refused(missing, OpenAI.NotFoundError, "request_unknown", "previous_response_id");
  }
  await assert.rejects(chats.create({ ...request, model: "no-such-model" }), OpenAI.NotFoundError);
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
