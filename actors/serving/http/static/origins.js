// Where a token came from, and which round it belongs to.

const ORIGINS = {
  TOKEN_ORIGIN_ACCEPTED: { kind: "accepted", label: "accepted draft" },
  TOKEN_ORIGIN_RECOVERED: { kind: "recovered", label: "recovered after a rejected draft" },
  TOKEN_ORIGIN_BONUS: { kind: "bonus", label: "bonus after accepted drafts" },
  TOKEN_ORIGIN_PLAIN: { kind: "plain", label: "plain, nothing drafted" },
};
const UNKNOWN = { kind: "unknown", label: "origin not reported" };

export function originOf(name) {
  return ORIGINS[name] ?? UNKNOWN;
}

// The tokens of one message, [{id, kind, label}], by round. The target's own token ends a round, so one without it is
// a round that a stop or the length limit cut. Without origins a message counts as one round.
export function splitRounds(tokens) {
  const rounds = [];
  let open = false;
  for (const token of tokens) {
    if (!open) rounds.push([]);
    rounds.at(-1).push(token);
    open = token.kind === "accepted" || token.kind === "unknown";
  }
  return rounds;
}

// Whether drafts were verified in a round. Null: not known.
export function wasDrafted(round) {
  const last = round.at(-1).kind;
  return last === "unknown" ? null : last !== "plain";
}
