// The form's request for OpenAI's API, as a command and as a program.

function openai({ text, chat, apply_chat_template: isChat, sampling, speculation }, model) {
  const messages = chat?.messages ?? [{ role: "user", content: text }];
  const json = { model, ...(chat || isChat ? { messages } : { prompt: text }), ...sampling };
  if (sampling.seed) json.seed = Number(sampling.seed);
  json.vllm_xargs = { "speculation.enabled": Number(speculation.enabled) };
  const k = speculation.num_speculative_tokens;
  if (k !== undefined) json.vllm_xargs["speculation.num_speculative_tokens"] = k;
  return { isChat: Boolean(chat || isChat), json };
}

// base: URL of the API, which ends with /v1.
export function asCurl(body, base, model) {
  const { isChat, json } = openai(body, model);
  const data = JSON.stringify(json, null, 2).replaceAll("'", "'\\''");
  return `curl ${base}/${isChat ? "chat/completions" : "completions"} -H 'Content-Type: application/json' -d '${data}'`;
}

export function asPython(body, base, model) {
  const { isChat, json: { vllm_xargs, ...json } } = openai(body, model);
  const options = JSON.stringify({ ...json, extra_body: { vllm_xargs } }, null, 4);
  return `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key="none")
answer = client.${isChat ? "chat.completions" : "completions"}.create(**${options})
print(answer.choices[0].${isChat ? "message.content" : "text"})`;
}
