import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { call, refused, report, url } from "./report.mjs";

const compatible = createOpenAICompatible({
  name: "conch",
  baseURL: `${url}/v1`,
  apiKey: "any",
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const models = {
  compatible: compatible("talker"),
  chat: createOpenAI({ baseURL: `${url}/v1`, apiKey: "any" }).chat("talker"),
  responses: createOpenAI({ baseURL: `${url}/v1`, apiKey: "any" }).responses("talker"),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "any" })("talker"),
};
const tools = {
  weather: tool({
    inputSchema: z.object({ place: z.string() }),
    execute: async ({ place }) => `sunny in ${place}`,
  }),
};

// The same with each provider.
async function each(step) {
  const results = {};
  for (const [name, model] of Object.entries(models)) results[name] = await step(model);
  return results;
}

await report({
  chat: () => each(async (model) => (await generateText({ model, prompt: "hello there", maxRetries: 0 })).text),
  streaming: () =>
    each(async (model) => {
      const parts = [];
      for await (const part of streamText({ model, prompt: "hello there", maxRetries: 0 }).textStream) parts.push(part);
      return parts;
    }),
  tools: () =>
    each(async (model) => {
      const answer = streamText({ model, tools, prompt: call, maxRetries: 0, stopWhen: stepCountIs(1) });
      return (await answer.toolResults).map((result) => result.output);
    }),
  "structured output": () =>
    each(async (model) => {
      const schema = z.object({ place: z.string() });
      return (await generateObject({ model, schema, prompt: '!say {"place": "Bonn"}', maxRetries: 0 })).object.place;
    }),
  embeddings: async () => {
    const model = compatible.textEmbeddingModel("embedder");
    return (await embedMany({ model, values: ["a", "bc"] })).embeddings.map((vector) => vector[0]);
  },
  errors: async () => {
    const error = await refused(() => generateText({ model: compatible("nobody"), prompt: "a", maxRetries: 0 }));
    return [APICallError.isInstance(error), error.statusCode, error.data.error.code];
  },
});
