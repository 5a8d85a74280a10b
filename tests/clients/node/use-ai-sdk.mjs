// Vercel's AI SDK: objects and streams, through its providers for OpenAI and for compatible servers.
import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, streamObject } from "ai";

import { BASE_URL, check, Forecast, MODEL, QUESTION, run } from "./checks.mjs";

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
