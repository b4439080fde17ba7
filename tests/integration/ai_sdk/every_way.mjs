// node every_way.mjs BASE_URL MODEL chat|responses PROMPT: what came of each way to ask, as JSON.
import { createOpenAI } from '@ai-sdk/openai';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, name, way, prompt] = process.argv.slice(2);

// Grammars for JSON allow any white space, which a random model would go on with.
const fetchWith = (more) => (url, init) =>
  fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), ...more }) });
const model = (more = {}) => createOpenAI({ baseURL, apiKey: 'none', fetch: fetchWith(more) })[way](name);
const withoutSpace = { logit_bias: { 32: -100, 10: -100 }, seed: 2 };
// By store: false the SDK knows that it must send what was said before itself.
const providerOptions = { openai: { store: false } };
const base = { temperature: 0, maxRetries: 0, prompt, providerOptions: way === 'responses' ? providerOptions : {} };
const schema = z.object({ ok: z.boolean(), colour: z.enum(['red', 'green']) });
const paint = tool({
  strict: true,
  description: 'Paints it.',
  inputSchema: schema,
  execute: async ({ colour }) => `painted ${colour}`,
});

const found = {};

const whole = await generateText({ ...base, model: model(), maxOutputTokens: 24 });
found.text = { text: whole.text, finishReason: whole.finishReason, outputTokens: whole.usage.outputTokens };

const stream = streamText({ ...base, model: model(), maxOutputTokens: 24 });
found.stream = '';
for await (const part of stream.textStream) found.stream += part;

const steps = streamText({
  ...base,
  model: model({ ...withoutSpace, parallel_tool_calls: false }),
  maxOutputTokens: 300,
  tools: { paint },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
});
await steps.consumeStream();
found.tools = (await steps.steps).map((step) => ({
  calls: step.toolCalls.map((call) => call.input),
  results: step.toolResults.map((result) => result.output),
  text: step.text,
}));

const made = await generateObject({ ...base, model: model(withoutSpace), maxOutputTokens: 300, schema });
found.object = made.object;

console.log(JSON.stringify(found));
