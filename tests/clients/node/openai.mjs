import OpenAI, { toFile } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { call, recording, refused, report, url, weather } from "./report.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const user = (content) => ({ model: "talker", messages: [{ role: "user", content }] });
const tools = [{ type: "function", function: { name: "weather", parameters: weather } }];

await report({
  chat: async () => (await client.chat.completions.create(user("hello there"))).choices[0].message.content,
  streaming: async () => {
    const parts = [];
    for await (const chunk of await client.chat.completions.create({ ...user("hello there"), stream: true }))
      if (chunk.choices[0].delta.content) parts.push(chunk.choices[0].delta.content);
    return parts;
  },
  tools: async () => {
    const runner = client.chat.completions.runTools({
      ...user(call),
      tools: [
        {
          type: "function",
          function: {
            name: "weather",
            parameters: weather,
            parse: JSON.parse,
            function: ({ place }) => `sunny in ${place}`,
          },
        },
      ],
    });
    return await runner.finalContent();
  },
  "streamed tools": async () => {
    const stream = client.chat.completions.stream({ ...user(call), tools });
    return (await stream.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments;
  },
  "structured output": async () => {
    const format = zodResponseFormat(z.object({ place: z.string() }), "weather");
    const answer = await client.chat.completions.parse({ ...user('!say {"place": "Bonn"}'), response_format: format });
    return answer.choices[0].message.parsed.place;
  },
  completions: async () =>
    (await client.completions.create({ model: "talker", prompt: "a text", max_tokens: 1 })).choices[0].text,
  responses: async () =>
    (await client.responses.create({ model: "talker", input: "hello there" })).output_text,
  "streamed responses": async () => {
    const stream = client.responses.stream({
      model: "talker",
      input: call,
      tools: [{ type: "function", name: "weather", parameters: weather, strict: false }],
    });
    const response = await stream.finalResponse();
    return response.output.map((item) => [item.type, item.name, item.arguments]);
  },
  embeddings: async () =>
    (await client.embeddings.create({ model: "embedder", input: ["a", "bc"] })).data.map((item) => item.embedding[0]),
  transcription: async () =>
    (await client.audio.transcriptions.create({ model: "listener", file: await toFile(recording(), "a.wav") })).text,
  models: async () => {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    return names.sort();
  },
  errors: async () => {
    const missing = await refused(() => client.chat.completions.create({ ...user("a"), model: "nobody" }));
    const unknown = await refused(() => client.chat.completions.create({ ...user("a"), max_token: 1 }));
    return [missing.constructor.name, missing.status, unknown.constructor.name, unknown.param];
  },
});
