import { InferenceClient } from "@huggingface/inference";
import { call, refused, report, url, weather } from "./report.mjs";

const client = new InferenceClient("any", { endpointUrl: `${url}/v1` });
const user = (content) => ({ model: "talker", messages: [{ role: "user", content }] });
const tools = [{ type: "function", function: { name: "weather", parameters: weather } }];

await report({
  chat: async () => (await client.chatCompletion(user("hello there"))).choices[0].message.content,
  streaming: async () => {
    const parts = [];
    for await (const chunk of client.chatCompletionStream(user("hello there")))
      if (chunk.choices[0].delta.content) parts.push(chunk.choices[0].delta.content);
    return parts;
  },
  tools: async () => (await client.chatCompletion({ ...user(call), tools })).choices[0].message.tool_calls[0].function,
  "structured output": async () => {
    const response_format = { type: "json_schema", json_schema: { name: "weather", schema: weather } };
    return (await client.chatCompletion({ ...user('!say {"place": "Bonn"}'), response_format })).choices[0].message.content;
  },
  embeddings: async () => {
    const embedder = new InferenceClient("any", { endpointUrl: `${url}/v2/models/embedder/embed` });
    return await embedder.featureExtraction({ inputs: "a" });
  },
  errors: async () => {
    const error = await refused(() => client.chatCompletion({ ...user("a"), model: "nobody" }));
    return [error.name, error.httpResponse.status];
  },
});
