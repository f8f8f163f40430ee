// Run Vercel's AI SDK by its defaults, Responses with earlier items by their names: `ai_sdk_client.mjs URL PACKAGES`.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , url, packages] = process.argv;
const { resolve } = createRequire(`${packages}/`);
const load = (name) => import(pathToFileURL(resolve(name)));
const { generateText, jsonSchema, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");

const calls = [];
const add = tool({
  description: "Add two numbers.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { a: { type: "integer" }, b: { type: "integer" } },
    required: ["a", "b"],
  }),
  execute: async ({ a, b }) => {
    calls.push([a, b]);
    return String(a + b);
  },
});
const options = {
  model: createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })("tiny"),
  system: "Be brief.",
  prompt: process.env.QUESTION ?? "What is 2 + 3 + 4?",
  tools: { add },
  stopWhen: stepCountIs(20),
};

const answer = (await generateText(options)).text;
const stream = streamText(options);
await stream.consumeStream();
const streamed = (await stream.steps).at(-1).text;
const version = createRequire(`${packages}/`)("ai/package.json").version;
console.log(JSON.stringify({ version, answer, streamed, calls }));
