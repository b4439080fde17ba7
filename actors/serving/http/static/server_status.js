// The strip at the top, and what the replica counted while an answer ran.

import { getJson } from "./event_stream.js";

const URL_STATUS = "outrider/v1/status";
const STATES = {
  LINK_STATE_UP: ["up", "up"],
  LINK_STATE_CONNECTING: ["connecting", "connecting"],
  LINK_STATE_DOWN: ["down", "down"],
};

export class ServerStatus {
  latest = null;
  follow = null; // called after every status that came

  // Returns the status, null when there was no answer. Never throws: the strip says what is wrong.
  async refresh() {
    try {
      this.latest = await getJson(URL_STATUS);
    } catch (error) {
      this.latest = null;
      write("server-link", `no status: ${error.message}`);
      document.getElementById("server-link").dataset.link = "down";
      return null;
    }
    this.#show(this.latest);
    this.follow?.();
    return this.latest;
  }

  #show({ model, methods, num_speculative_tokens: k, link, target, drafter }) {
    write("server-model", model);
    write("server-method", methods.length ? `${methods.join(", ")}, K = ${k}` : "none");
    const [state, text] = link ? (STATES[link.state] ?? ["down", "unknown"]) : ["none", "no drafter"];
    const element = document.getElementById("server-link");
    element.dataset.link = state;
    element.title = link ? linkTitle(link) : "";
    write("server-link", text);
    const attached = link?.drafter ? "attached" : "none attached";
    write("server-drafter", link ? [attached, load(drafter)].filter(Boolean).join(" · ") : "none");
    document.getElementById("server-drafter").title = link?.drafter ? `Ray actor ${link.drafter}` : "";
    write("server-target", load(target) || "–");
  }
}

function load(engine) {
  if (!engine) return "";
  const waiting = engine.waiting ? `, ${engine.waiting} waiting` : "";
  return `${engine.running} running${waiting}, KV ${(100 * engine.kv_cache_usage).toFixed(0)} %`;
}

function linkTitle(link) {
  const lines = [`link ${link.epoch}, ${link.reconnects} reconnects`, `round trip ${link.rtt_us.toFixed(0)} µs`];
  if (link.backend) lines.push(`over ${link.backend}`);
  if (link.last_error) lines.push(`last error: ${link.last_error}`);
  return lines.join("\n");
}

function write(id, text) {
  document.getElementById(id).textContent = text;
}

// Shares of what one replica counted between two statuses: {hits, accepted}, undefined where nothing was counted or
// where two replicas answered (their drafters have different names).
export function sharesBetween(before, after) {
  if (!before?.rounds || !after?.rounds || before.link?.drafter !== after.link?.drafter) return {};
  const counted = (name) => Number(after.rounds[name] ?? 0) - Number(before.rounds[name] ?? 0);
  const hits = counted("main_line_hits") + counted("side_branch_hits");
  return {
    hits: share(hits, hits + counted("misses")),
    accepted: share(counted("accepted"), counted("drafted")),
  };
}

function share(part, whole) {
  return whole > 0 && part >= 0 ? part / whole : undefined;
}

// Why rounds were not drafted between two statuses: texts, with what one replica counted where it did.
export function plainReasons(before, after) {
  if (!after) return [];
  if (!after.methods.length) return ["no drafter is configured"];
  if (after.link && after.link.state !== "LINK_STATE_UP") return ["no drafter is linked"];
  if (!before?.rounds || !after.rounds || before.link?.drafter !== after.link?.drafter) return [];
  const since = (read) => Number(read(after.rounds) ?? 0) - Number(read(before.rounds) ?? 0);
  return [
    [since((rounds) => rounds.lengths?.chosen_lengths?.[0]), "not expected to pay off"],
    [since((rounds) => rounds.late_rounds), "whose drafts came too late"],
    [since((rounds) => rounds.refused_proposals), "for which the drafter had no room, or still read the prompt"],
  ].filter(([count]) => count > 0).map(([count, words]) => `${count} ${words}`);
}
