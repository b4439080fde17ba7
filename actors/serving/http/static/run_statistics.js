// The figures of one answer, from its messages and when they came.

import { originOf, splitRounds, wasDrafted } from "./origins.js";

export class RunStatistics {
  tokens = [];
  rounds = [];
  finishReason = null;
  #startMs;
  #firstMs = null;
  #lastMs = null;
  #tokensOfFirst = 0;
  #draftedRounds = 0;
  #draftedTokens = 0;
  #plainRounds = 0;
  #exact = null;

  constructor(startMs) {
    this.#startMs = startMs;
  }

  // Returns the message's rounds: [{number, atMs, tokens: [{id, kind, label, round, number}]}].
  add(message, nowMs) {
    const ids = message.token_ids ?? [];
    const origins = message.origins ?? [];
    const tokens = ids.map((id, i) => ({ id, ...originOf(origins[i]), number: this.tokens.length + i + 1 }));
    this.tokens.push(...tokens);
    if (tokens.length) {
      if (this.#firstMs === null) {
        this.#firstMs = nowMs;
        this.#tokensOfFirst = tokens.length;
      }
      this.#lastMs = nowMs;
    }
    const added = splitRounds(tokens).map((members, i) => {
      const round = { number: this.rounds.length + i + 1, atMs: nowMs - this.#startMs, tokens: members };
      members.forEach((token) => (token.round = round));
      if (wasDrafted(members) === false) this.#plainRounds += 1;
      if (wasDrafted(members)) {
        this.#draftedRounds += 1;
        this.#draftedTokens += members.length;
      }
      return round;
    });
    this.rounds.push(...added);
    if (message.finish_reason) {
      this.finishReason = message.finish_reason;
      this.#exact = message.metrics?.speculative_decoding ?? {};
    }
    return added;
  }

  // Undefined: not known (yet). The server's own figures take over when the answer has ended.
  figures() {
    const counted = this.#exact?.num_spec_steps ? this.#exact : null;
    const live = this.#draftedRounds ? this.#draftedTokens / this.#draftedRounds : undefined;
    const drafted = counted?.num_draft_tokens;
    return {
      tokens: this.tokens.length,
      rounds: this.rounds.length,
      plainRounds: this.#plainRounds,
      firstMs: this.#firstMs === null ? undefined : this.#firstMs - this.#startMs,
      tokensPerSecond: this.#rate(),
      acceptanceLength: counted ? counted.mean_acceptance_length : live,
      acceptanceRate: drafted ? (counted.num_accepted_draft_tokens ?? 0) / drafted : undefined,
    };
  }

  // Of the tokens after the first message: what comes before it is the prompt's time.
  #rate() {
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    return seconds > 0 ? (this.tokens.length - this.#tokensOfFirst) / seconds : undefined;
  }
}

// Index of the first token in which two answers differ; null: they are the same.
export function firstDifference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let i = 0; i < length; i++) if (one[i]?.id !== other[i]?.id) return i;
  return null;
}
