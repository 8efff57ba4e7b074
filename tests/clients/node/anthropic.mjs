import Anthropic from "@anthropic-ai/sdk";
import { call, refused, report, url, weather } from "./report.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "any", maxRetries: 0 });
const user = (content) => ({ model: "talker", max_tokens: 100, messages: [{ role: "user", content }] });
const tools = [{ name: "weather", input_schema: weather }];

await report({
  chat: async () => (await client.messages.create(user("hello there"))).content[0].text,
  streaming: async () => {
    const parts = [];
    await client.messages.stream(user("hello there")).on("text", (text) => parts.push(text)).finalMessage();
    return parts;
  },
  tools: async () => {
    const asked = user(call);
    const first = await client.messages.create({ ...asked, tools });
    const results = first.content.map(({ id }) => ({ type: "tool_result", tool_use_id: id, content: "sunny" }));
    const messages = [
      ...asked.messages,
      { role: "assistant", content: first.content },
      { role: "user", content: [...results, { type: "text", text: "thanks" }] },
    ];
    const second = await client.messages.create({ ...asked, tools, messages });
    return [first.stop_reason, first.content[0].input, second.content[0].text];
  },
  "streamed tools": async () => (await client.messages.stream({ ...user(call), tools }).finalMessage()).content[0].input,
  "structured output": async () => {
    const output_config = { format: { type: "json_schema", schema: weather } };
    const answer = await client.messages.parse({ ...user('!say {"place": "Bonn"}'), output_config });
    return JSON.parse(answer.content[0].text).place;
  },
  "token counts": async () =>
    (await client.messages.countTokens({ model: "talker", messages: user("one two three").messages })).input_tokens,
  errors: async () => {
    const missing = await refused(() => client.messages.create({ ...user("a"), model: "nobody" }));
    const broken = await refused(() => client.messages.stream(user("!fail 2")).finalMessage());
    return [missing.constructor.name, missing.status, broken.error.error.type];
  },
});
