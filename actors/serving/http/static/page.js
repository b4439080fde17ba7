// The page: form, runs, and the comparison of both.

import { getJson, post, ServerError, streamEvents } from "./event_stream.js";
import { Pane } from "./pane.js";
import { asCurl, asPython } from "./request_code.js";
import { firstDifference } from "./run_statistics.js";
import { plainReasons, ServerStatus, sharesBetween } from "./server_status.js";
import { TokenTexts } from "./token_text.js";

const URL_STREAM = "outrider/v1/stream";
const URL_MODEL = "outrider/v1/model";
const URL_TOKEN_TEXTS = "outrider/v1/token_texts";
const STATUS_EVERY_MS = { idle: 5000, running: 1000 };

// Request field, in the server's errors, to the control that sets it.
const CONTROLS = {
  text: "prompt",
  prompt: "prompt",
  chat: "system",
  "sampling.temperature": "temperature",
  "sampling.top_p": "top-p",
  "sampling.stop": "stop",
  "sampling.max_tokens": "max-tokens",
  "sampling.seed": "seed",
  "speculation.num_speculative_tokens": "drafts",
  apply_chat_template: "chat-template",
};

const byId = (id) => document.getElementById(id);
const form = byId("form");
const texts = new TokenTexts(async (ids) => (await getJson(URL_TOKEN_TEXTS, post({ token_ids: ids }))).texts);
const panes = {
  speculated: new Pane(byId("pane-speculated"), "With speculation", texts),
  plain: new Pane(byId("pane-plain"), "Plain", texts),
};
const status = new ServerStatus();
let controller = null; // of the run under way

function requestBody(kind) {
  const sampling = { temperature: number("temperature"), top_p: number("top-p"), max_tokens: number("max-tokens") };
  const stop = byId("stop").value.replaceAll("\\n", "\n");
  if (stop) sampling.stop = [stop];
  const seed = byId("seed").value.trim();
  if (seed && !/^-?\d+$/.test(seed)) throw new ServerError({ message: "Seed: not a whole number.", param: "sampling.seed" });
  if (seed) sampling.seed = seed; // as text: it may be longer than a JavaScript number
  const speculation = { enabled: kind !== "plain" };
  if (kind !== "plain") speculation.num_speculative_tokens = number("drafts");
  const [text, system] = [byId("prompt").value, byId("system").value];
  if (system && byId("chat-template").checked) {
    const messages = [{ role: "system", content: system }, { role: "user", content: text }];
    return { chat: { messages }, sampling, speculation };
  }
  return { text, apply_chat_template: byId("chat-template").checked, sampling, speculation };
}

// undefined, which JSON leaves out, for an empty field.
function number(id) {
  const input = byId(id);
  if (input.validity.badInput) {
    const param = Object.keys(CONTROLS).find((field) => CONTROLS[field] === id);
    throw new ServerError({ message: `${input.labels[0].innerText.trim()}: not a number.`, param });
  }
  return input.value === "" ? undefined : input.valueAsNumber;
}

async function generate() {
  if (controller) return;
  clearError();
  const mode = form.elements.mode.value;
  const kinds = mode === "both" ? ["speculated", "plain"] : [mode];
  byId("panes").dataset.mode = mode;
  byId("verdict").textContent = "";
  delete byId("verdict").dataset.verdict;
  Object.values(panes).forEach((pane) => pane.clear());
  controller = new AbortController();
  byId("run").disabled = true;
  byId("cancel").disabled = false;
  say("Generating…");
  pollStatus();
  try {
    const bodies = kinds.map(requestBody);
    const hasSeed = "seed" in bodies[0].sampling;
    if (byId("order").value === "at-once") {
      await Promise.all(kinds.map((kind, i) => runOne(kind, bodies[i])));
    } else {
      for (const [i, kind] of kinds.entries()) await runOne(kind, bodies[i]);
    }
    say(kinds.map(summary).join(" "));
    if (mode === "both") compare(hasSeed, bodies[0].sampling.temperature === 0);
  } catch (error) {
    if (controller.signal.aborted && error.name === "AbortError") {
      say("Cancelled.");
    } else {
      controller.abort(); // the other one of two
      showError(error);
      say("Stopped.");
    }
  } finally {
    controller = null;
    byId("run").disabled = false;
    byId("cancel").disabled = true;
  }
}

async function runOne(kind, body) {
  const pane = panes[kind];
  const before = await status.refresh();
  const { signal } = controller;
  signal.throwIfAborted();
  pane.start();
  const follow = () => pane.setCounted(sharesBetween(before, status.latest), plainReasons(before, status.latest));
  if (kind === "speculated") status.follow = follow;
  try {
    for await (const message of streamEvents(URL_STREAM, body, signal)) pane.add(message);
    await pane.settle("done");
  } catch (error) {
    await pane.settle(error.name === "AbortError" ? "cancelled" : "failed");
    throw error;
  } finally {
    if (kind === "speculated") {
      await status.refresh();
      status.follow = null;
    }
  }
}

function summary(kind) {
  const { tokens, rounds, tokensPerSecond } = panes[kind].statistics.figures();
  const rate = tokensPerSecond === undefined ? "" : `, ${tokensPerSecond.toFixed(1)} tokens a second`;
  return `${panes[kind].title}: ${tokens} tokens in ${rounds} rounds${rate}.`;
}

function compare(hasSeed, greedy) {
  const [speculated, plain] = [panes.speculated.statistics, panes.plain.statistics];
  const parts = [];
  const ratio = speculated.figures().tokensPerSecond / plain.figures().tokensPerSecond;
  if (Number.isFinite(ratio)) parts.push(`Speed ratio ${ratio.toFixed(2)}×`);
  const at = firstDifference(speculated.tokens, plain.tokens);
  const verdict = byId("verdict");
  verdict.dataset.verdict = at === null ? "identical" : "different";
  if (at === null) {
    parts.push(`✓ identical: all ${plain.tokens.length} tokens are the same`);
  } else if (!hasSeed && !greedy) {
    parts.push(`≠ different from token ${at + 1} on, as expected: without a seed every run is a sample of its own`);
  } else {
    parts.push(`≠ different from token ${at + 1} on: rounding can decide between nearly equal tokens, float32 models do not show it`);
  }
  verdict.textContent = parts.join(" · ");
}

// The strip, as long as the page can be seen.
async function pollStatus() {
  clearTimeout(pollStatus.timer);
  if (!document.hidden) await status.refresh();
  clearTimeout(pollStatus.timer);
  pollStatus.timer = setTimeout(pollStatus, controller ? STATUS_EVERY_MS.running : STATUS_EVERY_MS.idle);
}

// What the form can offer with this model.
async function fitForm() {
  const { has_chat_template: has, num_speculative_tokens: k } = await getJson(URL_MODEL);
  const box = byId("chat-template");
  box.disabled = !has;
  box.checked = has;
  if (!has) box.parentElement.title = "The model has no chat template";
  const drafts = byId("drafts");
  drafts.disabled = !k;
  drafts.max = k;
  drafts.placeholder = k ? `up to ${k}` : "no drafter";
}

function showCode() {
  if (!byId("code").open) return;
  const [base, model] = [new URL("v1", location.href).href, byId("server-model").textContent];
  for (const [id, write] of [["code-curl", asCurl], ["code-python", asPython]]) {
    try {
      byId(id).textContent = write(requestBody(form.elements.mode.value), base, model);
    } catch (error) {
      byId(id).textContent = error.message;
    }
  }
}

async function copy(button) {
  const text = button.parentElement.parentElement.querySelector(button.dataset.copies).textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // Browsers have no clipboard for pages without TLS.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function say(text) {
  byId("state").textContent = text;
}

function showError(error) {
  const message = error instanceof ServerError ? error.message : `The server cannot be reached (${error.message}).`;
  const control = byId(CONTROLS[error.param] ?? "");
  const label = control?.labels[0].firstChild.textContent.trim();
  byId("error").textContent = label ? message.replace(`${error.param}:`, `${label}:`) : message;
  byId("error").hidden = false;
  if (!control) return;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", "error");
  control.focus();
}

function clearError() {
  byId("error").hidden = true;
  byId("error").textContent = "";
  for (const control of form.querySelectorAll("[aria-invalid]")) {
    control.removeAttribute("aria-invalid");
    control.removeAttribute("aria-describedby");
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("cancel").addEventListener("click", () => controller?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") controller?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
});
byId("code").addEventListener("toggle", showCode);
form.addEventListener("input", showCode);
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copies]");
  if (button) copy(button);
});
form.addEventListener("change", (event) => {
  if (event.target.name === "mode" && !controller) byId("panes").dataset.mode = event.target.value;
});
document.addEventListener("visibilitychange", pollStatus);
pollStatus();
fitForm().catch(showError);
