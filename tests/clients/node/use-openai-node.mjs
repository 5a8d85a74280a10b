// The openai package of Node: parse, the stream helper, and errors.
import assert from "node:assert/strict";

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";

import { CHAT, check, Forecast, MODEL, run } from "./checks.mjs";

const chats = new OpenAI({ maxRetries: 0 }).chat.completions;
const request = { model: MODEL, messages: CHAT, temperature: 0, max_tokens: 128 };
const forecast = zodResponseFormat(Forecast, "forecast");

check("parse_returns_the_object", async () => {
  const { choices } = await chats.parse({ ...request, response_format: forecast });
  assert.equal(choices[0].finish_reason, "stop");
  Forecast.parse(choices[0].message.parsed);
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
