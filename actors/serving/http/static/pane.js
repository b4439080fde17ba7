// One answer on the screen: figures, a strip of rounds, the text with each token's origin, and the same as a table.

import { RunStatistics } from "./run_statistics.js";
import { TokenAligner } from "./token_text.js";

const ROWS_AT_ONCE = 500;

export class Pane {
  statistics = new RunStatistics(0);

  constructor(section, title, texts) {
    section.append(document.getElementById("pane-template").content.cloneNode(true));
    this.section = section;
    this.texts = texts;
    const heading = section.querySelector("h2");
    heading.textContent = title;
    heading.id = section.getAttribute("aria-labelledby");
    this.title = title;
    this.text = section.querySelector(".text");
    this.text.setAttribute("aria-label", `Answer, ${title}`);
    this.strip = section.querySelector(".strip");
    this.columns = section.querySelector(".columns");
    this.table = section.querySelector("details");
    this.table.querySelector(".scroll").setAttribute("aria-label", `Rounds, ${title}`);
    this.table.addEventListener("toggle", () => this.#showRows());
    this.clear();
  }

  clear() {
    this.aligner = new TokenAligner((id) => this.texts.get(id));
    this.statistics = new RunStatistics(performance.now());
    this.tail = document.createElement("span");
    this.tail.className = "tail";
    this.text.replaceChildren(this.tail);
    this.columns.replaceChildren();
    this.table.querySelector("tbody").replaceChildren();
    this.shownRows = 0;
    this.textOfRound = [];
    this.drawing = false;
    this.highest = 1;
    this.shares = {};
    this.reasons = null;
    this.setState("idle");
    this.#draw();
  }

  // The time of the first token counts from here.
  start() {
    this.clear();
    this.setState("running");
  }

  add(message) {
    const rounds = this.statistics.add(message, performance.now());
    for (const round of rounds) this.#addColumn(round);
    this.aligner.push(rounds.flatMap((round) => round.tokens), message.text_delta ?? "");
    if (message.finish_reason) this.aligner.end();
    const learned = this.texts.learn(rounds.flatMap((round) => round.tokens.map((token) => token.id)));
    learned.then(() => this.#drawSoon(), () => this.#drawSoon());
    this.#drawSoon();
  }

  // The whole text is shown with its tokens once this resolves, whatever could not be learned about them.
  async settle(state) {
    this.setState(state);
    this.aligner.end();
    await this.texts.learn(this.statistics.tokens.map((token) => token.id)).catch(() => undefined);
    this.#draw(false);
  }

  setState(state) {
    this.section.dataset.state = state;
    this.text.setAttribute("aria-busy", String(state === "running"));
    this.#figure("state").textContent = state;
  }

  // What the replica counted since the start: shares {hits, accepted}, and reasons of rounds without drafts, as texts.
  setCounted(shares, reasons) {
    this.shares = shares;
    this.reasons = reasons;
    this.#drawSoon();
  }

  #show(name, value, digits = 0, suffix = "") {
    this.#figure(name).textContent = value === undefined ? "–" : value.toFixed(digits) + suffix;
  }

  #showPercent(name, share) {
    this.#show(name, share === undefined ? undefined : 100 * share, 0, " %");
  }

  #figure(name) {
    return this.section.querySelector(`[data-figure="${name}"]`);
  }

  #drawSoon() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => this.drawing && this.#draw());
  }

  #draw(patient = true) {
    this.drawing = false;
    const atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    for (const [token, text] of this.aligner.take(patient)) this.#addToken(token, text);
    this.tail.textContent = this.aligner.pending;
    const figures = this.statistics.figures();
    this.#show("rate", figures.tokensPerSecond, 1);
    this.#show("first", figures.firstMs);
    this.#show("tokens", figures.tokens || undefined);
    this.#show("rounds", figures.rounds || undefined);
    this.#show("length", figures.acceptanceLength, 2);
    this.#showPercent("rate-accepted", figures.acceptanceRate ?? this.shares.accepted);
    this.#showPercent("hits", this.shares.hits);
    this.#figure("why").textContent = this.reasons && figures.plainRounds ? whyPlain(figures, this.reasons) : "";
    this.strip.setAttribute("aria-label", stripLabel(figures));
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
    this.#showRows();
  }

  #addToken(token, text) {
    const { round } = token;
    this.textOfRound[round.number] = (this.textOfRound[round.number] ?? "") + text;
    if (!round.element) {
      round.element = document.createElement("span");
      round.element.className = "round";
      round.element.dataset.round = round.number;
      this.tail.before(round.element);
    }
    const element = document.createElement("span");
    element.className = `token ${token.kind}`;
    element.title = `${token.label} · token ${token.number}, id ${token.id} · round ${round.number}`;
    element.textContent = text;
    if (text.includes("\n")) element.classList.add("newline");
    if (!text) {
      element.classList.add("empty");
      element.title += " · no text of its own";
    }
    round.element.append(element);
  }

  #addColumn({ number, tokens }) {
    const column = document.createElement("span");
    column.className = "column";
    column.title = `round ${number}: ${tokens.length} ${tokens.length === 1 ? "token" : "tokens"}`;
    for (const { kind } of tokens) {
      const segment = document.createElement("i");
      segment.className = kind;
      column.append(segment);
    }
    this.columns.append(column);
    if (tokens.length > this.highest) {
      this.highest = tokens.length;
      this.columns.style.setProperty("--highest", tokens.length);
    }
    this.strip.scrollLeft = this.strip.scrollWidth;
  }

  // Only while the table is open: an answer may have thousands of rounds.
  #showRows() {
    if (!this.table.open) return;
    const body = this.table.querySelector("tbody");
    const rounds = this.statistics.rounds.slice(this.shownRows, this.shownRows + ROWS_AT_ONCE);
    // A round is listed when its text is complete: when the next one's has begun, or nothing is left to come.
    const complete = rounds.filter(({ number }) => this.textOfRound[number + 1] !== undefined || !this.#isRunning());
    for (const { number, atMs, tokens } of complete) {
      const own = tokens.at(-1).kind;
      const accepted = tokens.filter(({ kind }) => kind === "accepted").length;
      const end = own === "accepted" ? "stop or limit" : own;
      const row = body.insertRow();
      for (const cell of [number, atMs.toFixed(0), accepted, end, this.textOfRound[number] ?? ""]) {
        row.insertCell().textContent = cell;
      }
    }
    this.shownRows += complete.length;
    if (complete.length === ROWS_AT_ONCE) this.#drawSoon();
  }

  #isRunning() {
    return this.section.dataset.state === "running";
  }
}

function stripLabel({ rounds, tokens, acceptanceLength }) {
  if (!rounds) return "Rounds: none yet";
  const length = acceptanceLength === undefined ? "" : `, acceptance length ${acceptanceLength.toFixed(2)}`;
  return `Rounds: ${rounds}, with ${tokens} tokens${length}`;
}

function whyPlain({ plainRounds }, reasons) {
  const first = "the first, which reads the prompt";
  return `${plainRounds} ${plainRounds === 1 ? "round" : "rounds"} without drafts: ${[first, ...reasons].join("; ")}`;
}
