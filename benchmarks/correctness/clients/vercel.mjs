// Requests tool calls, objects and a stream with Vercel's `ai` package: `node vercel.mjs URL MODEL`.

import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const local = { name: "local", baseURL: url, supportsStructuredOutputs: true, includeUsage: true };
const model = createOpenAICompatible(local)(name);
const schema = jsonSchema(
  {
    type: "object",
    properties: { city: { type: "string", maxLength: 8 }, unit: { enum: ["C", "F"] } },
    required: ["city", "unit"],
    additionalProperties: false,
  },
  {
    validate: (value) =>
      typeof value?.city === "string" && ["C", "F"].includes(value.unit) && Object.keys(value).length === 2
        ? { success: true, value }
        : { success: false, error: new Error(JSON.stringify(value)) },
  },
);
const weather = tool({ description: "Weather of a city", inputSchema: schema, execute: async () => "20 degrees" });
const asked = { model, prompt: "How is the weather in Paris?", maxOutputTokens: 80, maxRetries: 0, temperature: 0 };

// A call, its result, and the turn after it.
const called = await generateText({
  ...asked,
  tools: { weather },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  stopWhen: stepCountIs(2),
});
assert.equal(called.steps[0].finishReason, "tool-calls");
assert.equal(called.steps[0].toolResults[0].output, "20 degrees");
assert.equal(called.steps.length, 2);

// The same call streamed.
const streamedCall = streamText({ ...asked, tools: { weather }, toolChoice: "required" });
assert.deepEqual((await streamedCall.toolCalls)[0].input, called.steps[0].toolCalls[0].input);

// A call that is cut, and sent back in the next turn.
const cut = await generateText({ ...asked, tools: { weather }, toolChoice: "required", maxOutputTokens: 24 });
assert.equal(cut.finishReason, "length");
assert.equal(cut.toolCalls[0].toolName, "weather");
const turns = [{ role: "user", content: asked.prompt }, ...cut.response.messages, { role: "user", content: "Go on." }];
await generateText({ ...asked, prompt: undefined, messages: turns, maxOutputTokens: 8 });

// Objects, with tools and without.
assert.ok((await generateObject({ ...asked, schema })).object.city !== undefined);
const output = Output.object({ schema });
assert.ok((await generateText({ ...asked, output })).output.city !== undefined);
const both = await generateText({ ...asked, output, tools: { weather }, stopWhen: stepCountIs(1) });
assert.ok(both.finishReason === "tool-calls" ? both.toolResults.length : both.output.city !== undefined);
const streamedObject = streamText({ ...asked, output });
assert.ok((await streamedObject.output).city !== undefined);

// Text, whole and streamed.
const whole = await generateText(asked);
const streamed = streamText(asked);
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, whole.text);
assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
