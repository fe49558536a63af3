// Programs of npm's clients, one question and one tool each: node clients.mjs NAME. The gateway's address is BASE_URL.
import process from "node:process";

const [name] = process.argv.slice(2);
const baseURL = process.env.BASE_URL;
const root = baseURL.replace(/\/v1$/, "");
const question = "Weather in Rome?";
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = ({ city }) => `sunny in ${city}`;

async function aiSdk(model, { streamed = false } = {}) {
  const { generateText, streamText, tool, stepCountIs, jsonSchema } = await import("ai");
  const tools = { weather: tool({ description: "How the weather is.", inputSchema: jsonSchema(schema), execute: weather }) };
  const how = { model, tools, prompt: question, system: "Be brief.", stopWhen: stepCountIs(4), maxRetries: 0 };
  if (!streamed) return (await generateText(how)).text;
  const errors = [];
  const result = streamText({ ...how, onError: ({ error }) => errors.push(error) });
  for await (const _ of result.textStream);
  if (errors.length) throw errors[0];
  return await result.text;
}

async function aiOpenai(kind, more) {
  const { createOpenAI } = await import("@ai-sdk/openai");
  const provider = createOpenAI({ baseURL, apiKey: "any" });
  return aiSdk(kind === "chat" ? provider.chat("m") : provider("m"), more);
}

async function toolRunner(stream) {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: root, apiKey: "any", maxRetries: 0 });
  const tool = { type: "custom", name: "weather", description: "How.", input_schema: schema, run: weather, parse: (x) => x };
  const messages = [{ role: "user", content: question }];
  const runner = client.beta.messages.toolRunner({ model: "m", max_tokens: 200, messages, tools: [tool], stream });
  const last = await runner.runUntilDone();
  return last.content.map((block) => block.text ?? "").join("");
}

async function langchain(model) {
  const { HumanMessage, ToolMessage } = await import("@langchain/core/messages");
  const tools = [{ type: "function", function: { name: "weather", description: "How.", parameters: schema } }];
  const bound = model.bindTools(tools);
  const messages = [new HumanMessage(question)];
  for (;;) {
    const said = await bound.invoke(messages);
    messages.push(said);
    if (!said.tool_calls?.length) return said.text;
    for (const call of said.tool_calls) {
      messages.push(new ToolMessage({ content: weather(call.args), tool_call_id: call.id }));
    }
  }
}

const programs = {
  "ai-openai": () => aiOpenai(),
  "ai-openai-streamed": () => aiOpenai("", { streamed: true }),
  "ai-openai-chat": () => aiOpenai("chat"),
  "ai-openai-chat-streamed": () => aiOpenai("chat", { streamed: true }),
  "ai-compatible": async () => {
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    return aiSdk(createOpenAICompatible({ name: "agl", baseURL, apiKey: "any" })("m"));
  },
  "ai-anthropic": async () => {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    return aiSdk(createAnthropic({ baseURL, apiKey: "any" })("m"));
  },
  "ai-anthropic-streamed": async () => {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    return aiSdk(createAnthropic({ baseURL, apiKey: "any" })("m"), { streamed: true });
  },
  "anthropic-runner": () => toolRunner(false),
  "anthropic-runner-streamed": () => toolRunner(true),
  "openai-run-tools": async () => {
    const { default: OpenAI } = await import("openai");
    const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
    const run = { name: "weather", description: "How.", parameters: schema, parse: JSON.parse, function: weather };
    const messages = [{ role: "user", content: question }];
    return client.chat.completions.runTools({ model: "m", messages, tools: [{ type: "function", function: run }] }).finalContent();
  },
  "openai-agents": async () => {
    const { Agent, run, tool, setTracingDisabled, setDefaultOpenAIClient } = await import("@openai/agents");
    const { default: OpenAI } = await import("openai");
    setTracingDisabled(true);
    setDefaultOpenAIClient(new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 }));
    const parameters = { ...schema, additionalProperties: false };
    const tools = [tool({ name: "weather", description: "How.", parameters, strict: true, execute: weather })];
    return (await run(new Agent({ name: "a", instructions: "Be brief.", model: "m", tools }), question)).finalOutput;
  },
  "langchain-openai": async () => {
    const { ChatOpenAI } = await import("@langchain/openai");
    return langchain(new ChatOpenAI({ model: "m", apiKey: "any", configuration: { baseURL }, maxRetries: 0 }));
  },
  "langchain-anthropic": async () => {
    const { ChatAnthropic } = await import("@langchain/anthropic");
    return langchain(new ChatAnthropic({ model: "claude-sonnet-4-5", apiKey: "any", anthropicApiUrl: root, maxRetries: 0 }));
  },
};

const answer = await programs[name]();
process.stdout.write(`${answer}\n`);
process.exit(0);
