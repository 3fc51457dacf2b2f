/**
 * Calls of the public API, from the same origin, with the session that is signed in.
 *
 *   const page = await get("/v1/tunings", {query: {state: "RUNNING", limit: 50}, signal})
 *   const tuning = await post("/v1/tunings", body, {idempotencyKey: crypto.randomUUID()})
 *   await del(`/v1/tunings/${id}`)
 *   if (may("tunings:write")) ...                     true if the signed-in key has a scope (admin has all)
 *
 * An unsuccessful response is thrown as an `ApiProblem` (with `.code`, `.detail`, `.title`, `.status`, `.errors`, each
 * with `.field`, `.message`, `.value`); an unreachable service as one with the code "unreachable".
 * After 401 the browser goes to the sign-in page and returns afterwards; the promise never settles. Before that, the
 * window receives a `LEAVING` event, so that a form can be kept.
 */

export const LEAVING = "batchwright:signing-in";

const SAFE = new Set(["GET", "HEAD"]);

/** A problem document (RFC 9457), or a missing response. */
export class ApiProblem extends Error {
  constructor({ code, title = "", detail = "", status = 0, errors = [] }, retryAfter = null) {
    super(detail || title);
    this.name = "ApiProblem";
    this.code = code;
    this.title = title;
    this.detail = detail || title;
    this.status = status;
    this.errors = errors;
    /** Seconds to wait before the next try, where the service says so. */
    this.retryAfter = retryAfter;
  }

  /** True if the same call may succeed a little later. */
  get isTransient() {
    return this.code === "unreachable" || this.status === 503 || this.status === 429 || this.status >= 502;
  }
}

/** The JSON at `path`. */
export function get(path, options = {}) {
  return call("GET", path, undefined, options);
}

/** The response to `body`, sent as JSON; null for an empty response. */
export function post(path, body, options = {}) {
  return call("POST", path, body, options);
}

/** Deletes the resource at `path`. */
export function del(path, options = {}) {
  return call("DELETE", path, undefined, options);
}

/**
 * The response itself, for content other than JSON (logs, exports, event streams). The errors are those of `get`.
 *
 * @param {string} method
 * @param {string} path
 * @param {*} body  Sent as JSON unless undefined.
 * @param {{query?: Object, signal?: AbortSignal, headers?: Object, idempotencyKey?: string}} options
 * @returns {Promise<Response>}
 */
export async function request(method, path, body, { query = {}, signal, headers = {}, idempotencyKey } = {}) {
  const sent = { Accept: "application/json", ...headers };
  if (body !== undefined) {
    sent["Content-Type"] = "application/json";
  }
  if (!SAFE.has(method) && csrfToken() !== "") {
    sent["X-CSRF-Token"] = csrfToken();
  }
  if (idempotencyKey !== undefined) {
    sent["Idempotency-Key"] = idempotencyKey;
  }
  const init = { method, headers: sent, body: body === undefined ? undefined : JSON.stringify(body), signal };
  const response = await fetched(addressOf(path, query), init);
  if (response.status === 401) {
    return signIn();
  }
  if (!response.ok && response.status !== 304) {
    throw await problemOf(response);
  }
  return response;
}

/** The text of a response of `request`; a connection that breaks meanwhile is a problem like any other. */
export function textOf(response) {
  return bodyOf(response, "text");
}

/** True if the signed-in key has this scope. The API decides; pages only hide actions that it would refuse. */
export function may(scope) {
  const scopes = (document.body.dataset.scopes ?? "").split(" ");
  return scopes.includes(scope) || scopes.includes("admin");
}

/** The id of the signed-in key; "" on a service without keys. */
export function keyId() {
  return document.body.dataset.keyId ?? "";
}

/** `path` with the parts of `query` that have a value; those of a list are repeated. */
export function addressOf(path, query = {}) {
  const given = Object.entries(query).flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((each) => [name, each])).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length === 0 ? path : `${path}?${new URLSearchParams(given)}`;
}

/** The token that changes need, besides the session's cookie. */
export function csrfToken() {
  return document.querySelector('meta[name="csrf-token"]')?.content ?? "";
}

async function call(method, path, body, options) {
  const response = await request(method, path, body, options);
  return response.status === 204 ? null : bodyOf(response, "json");
}

async function fetched(address, init) {
  try {
    return await fetch(address, { ...init, credentials: "same-origin", redirect: "error" });
  } catch (error) {
    throw unreachable(error);
  }
}

async function bodyOf(response, kind) {
  try {
    return await response[kind]();
  } catch (error) {
    throw unreachable(error);
  }
}

function unreachable(error) {
  const detail = "The service cannot be reached. It may be restarting.";
  return error.name === "AbortError" ? error : new ApiProblem({ code: "unreachable", title: "No response", detail });
}

async function problemOf(response) {
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  try {
    return new ApiProblem({ status: response.status, ...(await response.json()) }, retryAfter);
  } catch {
    const detail = `The service responded ${response.status} ${response.statusText}.`;
    return new ApiProblem({ code: `http-${response.status}`, title: "Error", detail, status: response.status });
  }
}

function signIn() {
  const here = location.pathname + location.search;
  window.dispatchEvent(new Event(LEAVING));
  location.assign(`/sign-in?next=${encodeURIComponent(here)}`);
  return new Promise(() => {}); // the page is about to be left: no error must be shown meanwhile
}
