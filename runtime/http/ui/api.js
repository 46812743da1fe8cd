// The server's API. Every call carries the API key, once the user has given one; it lives as long as the tab.

const KEY = "pensieve-api-key";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function conversationPath(id) {
  return `v1/conversations/${encodeURIComponent(id)}`;
}

export async function ask(method, path, body) {
  return (await answer(method, path, body)).json();
}

// The objects of a stream. An abort of `signal` stops the reply.
export async function* events(path, body, signal) {
  const response = await answer("POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(event.error.message, 500);
      yield event;
    }
  }
}

async function answer(method, path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) }).catch(unreached);
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

function unreached(error) {
  throw error.name === "TypeError" ? new ApiError("the server cannot be reached", 0) : error;
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answers ${response.status} ${response.statusText}`;
  }
}
