// Which part of an answer's text each token is.
//
// A message brings the text of its tokens together. Each token's own text, asked for once per id, says where to cut.
// Some tokens have none of their own: part of a character, a special token that the text leaves out, a leading space
// that a tokenizer drops. Those share the text up to the next token that is found again. The text itself is always the
// answer's, character for character.

const REPLACEMENT = "\ufffd";
const MAX_IDS = 512;

// Texts of token ids, kept for as long as the page is open.
export class TokenTexts {
  #texts = new Map();
  #asked = new Set();

  // fetchTexts: async ids -> texts, one each.
  constructor(fetchTexts) {
    this.fetchTexts = fetchTexts;
  }

  // undefined: not known, or not yet.
  get(id) {
    return this.#texts.get(id);
  }

  // Resolves when nothing new can be learned about these ids. Throws what fetchTexts throws; they may be asked again.
  async learn(ids) {
    const wanted = [...new Set(ids)].filter((id) => !this.#asked.has(id));
    for (let i = 0; i < wanted.length; i += MAX_IDS) await this.#ask(wanted.slice(i, i + MAX_IDS));
  }

  async #ask(ids) {
    ids.forEach((id) => this.#asked.add(id));
    try {
      const texts = await this.fetchTexts(ids);
      ids.forEach((id, i) => this.#texts.set(id, texts[i]));
    } catch (error) {
      ids.forEach((id) => this.#asked.delete(id));
      throw error;
    }
  }
}

export class TokenAligner {
  #queue = [];
  #text = "";
  #ended = false;

  // textOf: id -> its own text, or undefined.
  constructor(textOf) {
    this.textOf = textOf;
  }

  // Text that no token has been given yet.
  get pending() {
    return this.#text;
  }

  push(tokens, text) {
    this.#queue.push(...tokens);
    this.#text += text;
  }

  end() {
    this.#ended = true;
  }

  // What can be told now: [[token, its text], ...], in order. patient: wait for texts that are not known yet.
  take(patient = true) {
    const taken = [];
    while (this.#queue.length) {
      const own = this.textOf(this.#queue[0].id);
      if (own === undefined && patient) break;
      const found = own === undefined ? null : this.#leading(own);
      if (found !== null) {
        taken.push([this.#queue.shift(), this.#cut(found)]);
      } else if (!this.#ended && own?.startsWith(this.#text)) {
        break; // held back: a stop string may be in the making
      } else if (!this.#takeGroup(taken, patient)) {
        break;
      }
    }
    return taken;
  }

  // Length of the text that is this token's, or null.
  #leading(own) {
    if (own.includes(REPLACEMENT)) return null;
    if (this.#text.startsWith(own)) return own.length;
    if (this.#text.startsWith(` ${own}`)) return own.length + 1;
    return null;
  }

  // The first tokens up to one that is found again in the text; they share what is before it.
  #takeGroup(taken, patient) {
    for (let size = 1; size < this.#queue.length; size++) {
      const own = this.textOf(this.#queue[size].id);
      if (own === undefined && patient) return false;
      if (!own || own.includes(REPLACEMENT)) continue;
      const at = this.#text.indexOf(own);
      if (at >= 0) return this.#share(taken, size, at);
    }
    return this.#ended && this.#share(taken, this.#queue.length, this.#text.length);
  }

  #share(taken, size, length) {
    for (let i = 1; i < size; i++) taken.push([this.#queue.shift(), ""]);
    taken.push([this.#queue.shift(), this.#cut(length)]);
    return true;
  }

  #cut(length) {
    const text = this.#text.slice(0, length);
    this.#text = this.#text.slice(length);
    return text;
  }
}
