// Requests to the server: JSON in, JSON or a stream of server-sent events out.

const PREFIX = "data: ";
const KEY = "outrider-api-key"; // In sessionStorage: gone with the tab.
let declined = false;

// fetch, with the API key that was typed. Where the server asks for one, so does the page: once, and again for a POST.
async function ask(url, options = {}) {
  const sent = sessionStorage.getItem(KEY);
  const response = await fetch(url, withKey(options, sent));
  if (response.status !== 401) return response;
  if (sessionStorage.getItem(KEY) === sent && (!declined || options.method === "POST")) {
    const typed = window.prompt("This server asks for an API key.")?.trim();
    declined = !typed;
    if (typed) sessionStorage.setItem(KEY, typed);
    else sessionStorage.removeItem(KEY);
  }
  const key = sessionStorage.getItem(KEY);
  return key && key !== sent ? fetch(url, withKey(options, key)) : response;
}

function withKey(options, key) {
  return key ? { ...options, headers: { ...options.headers, Authorization: `Bearer ${key}` } } : options;
}

export class ServerError extends Error {
  // param: the request field at fault, or null.
  constructor({ message, param = null }) {
    super(message);
    this.param = param;
  }
}

export async function getJson(url, options = {}) {
  const response = await ask(url, options);
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

export function post(body, signal) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
}

// The data of each event, parsed. Throws ServerError for a refusal, for an error event, and for a stream that is cut.
export async function* streamEvents(url, body, signal) {
  const response = await ask(url, post(body, signal));
  if (!response.ok) throw await errorOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError({ message: "The connection ended before the answer did." });
    buffer += value;
    for (let end; (end = buffer.indexOf("\n\n")) >= 0; buffer = buffer.slice(end + 2)) {
      const data = buffer.slice(PREFIX.length, end);
      if (data === "[DONE]") return;
      const message = JSON.parse(data);
      if (message.error) throw new ServerError(message.error);
      yield message;
    }
  }
}

async function errorOf(response) {
  try {
    return new ServerError((await response.json()).error);
  } catch {
    return new ServerError({ message: `The server answered ${response.status} ${response.statusText}.` });
  }
}
