// Vercel's AI SDK: objects, tools and streams, through its providers for OpenAI and for compatible servers.
import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, streamObject, streamText, tool } from "ai";

import { BASE_URL, check, Forecast, MODEL, QUESTION, run, WEATHER, WeatherQuery } from "./checks.mjs";

const compatible = createOpenAICompatible({
  name: "quire",
  baseURL: BASE_URL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = {
  openai: createOpenAI({ baseURL: BASE_URL, apiKey: "none" }).chat(MODEL),
  compatible: compatible(MODEL),
};

// The tool, which adds the arguments of each call to `asked`.
function weatherTool(asked) {
  return tool({
    description: "Weather of a city.",
    inputSchema: WeatherQuery,
    execute: (query) => {
      asked.push(query);
      return WEATHER;
    },
  });
}

// Asserts that the tool was asked, each time with valid arguments.
function checkAsked(asked) {
  assert.ok(asked.length >= 1);
  asked.forEach((query) => WeatherQuery.parse(query));
}

for (const [provider, model] of Object.entries(models)) {
  const request = { model, prompt: QUESTION, temperature: 0, maxOutputTokens: 128, maxRetries: 0 };

  check(`${provider}_generate_object`, async () => {
    const { object, finishReason } = await generateObject({ ...request, schema: Forecast });
    assert.equal(finishReason, "stop");
    Forecast.parse(object);
  });

  check(`${provider}_generate_text_with_an_object_as_output`, async () => {
    const { output } = await generateText({ ...request, output: Output.object({ schema: Forecast }) });
    Forecast.parse(output);
  });

  check(`${provider}_generate_one_of_several_choices`, async () => {
    const options = ["rain", "sun", "snow"];
    const { object } = await generateObject({ ...request, output: "enum", enum: options });
    assert.ok(options.includes(object));
  });

  check(`${provider}_stream_object`, async () => {
    const stream = streamObject({ ...request, schema: Forecast });
    const parts = [];
    for await (const part of stream.partialObjectStream) parts.push(part);
    assert.ok(parts.length > 1);
    Forecast.parse(await stream.object);
  });

  check(`${provider}_generate_text_with_a_tool`, async () => {
    const asked = [];
    const tools = { get_weather: weatherTool(asked) };
    const many = { ...request, maxOutputTokens: 1024 }; // a small model repeats a call until no further one is allowed
    const { toolCalls, toolResults, finishReason } = await generateText({ ...many, tools, toolChoice: "required" });
    assert.equal(finishReason, "tool-calls");
    assert.equal(toolCalls.length, asked.length);
    assert.deepEqual(new Set(toolResults.map(({ output }) => output)), new Set([WEATHER]));
    checkAsked(asked);
  });

  check(`${provider}_stream_text_with_a_tool_and_its_result`, async () => {
    const asked = [];
    const stream = streamText({
      ...request,
      tools: { get_weather: weatherTool(asked) },
      prepareStep: ({ stepNumber }) => ({
        toolChoice: stepNumber === 0 ? { type: "tool", toolName: "get_weather" } : "none",
      }),
      stopWhen: ({ steps }) => steps.length >= 2,
      onError: () => {},
    });
    const kinds = new Map();
    for await (const part of stream.fullStream) {
      if (part.type === "error") throw part.error;
      kinds.set(part.type, (kinds.get(part.type) ?? 0) + 1);
    }
    assert.ok(kinds.get("tool-input-delta") > 1, "the arguments arrive at once");
    checkAsked(asked);
    assert.ok((await stream.text).length > 0);
  });

  check(`${provider}_a_value_out_of_range_is_a_bad_request`, async () => {
    await assert.rejects(generateText({ ...request, temperature: undefined, topP: 7 }), (error) => {
      assert.ok(APICallError.isInstance(error));
      assert.equal(error.statusCode, 400);
      assert.equal(error.data.error.param, "top_p");
      return true;
    });
  });
}

await run();
