// What the views read: the server's routes, or the answers that a report carries inside its file.

const answers = new Map();
const MOST = 60;
let frozen = null;

export const isFrozen = () => frozen !== null;

// Make `get` look answers up in a report. routes: {path with its sorted query: answer}.
export function freeze(routes) {
  frozen = new Map(Object.entries(routes));
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Return the answer of a route; the same object as before where it has not changed.
export async function get(...parts) {
  const query = typeof parts.at(-1) === "object" ? parts.pop() : {};
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const path = `api/${parts.map(encodeURIComponent).join("/")}`;
  if (frozen) return found(path, Object.fromEntries(given));
  const address = given.length ? `${path}?${new URLSearchParams(given)}` : path;
  const known = answers.get(address);
  const headers = known ? { "If-None-Match": known.etag } : {};
  const response = await fetch(address, { headers, cache: "no-store" });
  if (response.status === 304) return known.value;
  if (!response.ok) throw new Refused(response.status, await reason(response));
  const value = await response.json();
  answers.delete(address);
  if (response.headers.get("ETag")) answers.set(address, { etag: response.headers.get("ETag"), value });
  if (answers.size > MOST) answers.delete(answers.keys().next().value);
  return value;
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error.message ?? String(error);
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

export async function signIn(key) {
  const body = JSON.stringify({ key });
  const response = await fetch("api/key", { method: "POST", headers: { "Content-Type": "application/json" }, body });
  if (!response.ok) throw new Refused(response.status, "This is not the key.");
}

function found(path, query) {
  const names = new URLSearchParams(Object.entries(query).filter(([name]) => ["update", "runs"].includes(name)));
  const value = frozen.get(names.size ? `${path}?${names}` : path);
  if (value === undefined) throw new Refused(404, "This is not in the report's file; `rlhf watch` shows everything.");
  if (value.groups) return chosen(value, query);
  return path.endsWith("/rows") ? ordered(value, query) : value;
}

// Sort the rows of one update, and return those of one page, as the server does.
function ordered(value, { sort = "row", offset = 0, limit = value.rows.length }) {
  const [, sign, by] = sort.match(/^(-?)(.*)$/);
  const rows = [...value.rows].sort((a, b) => (sign ? -1 : 1) * ((a[by] ?? 0) - (b[by] ?? 0)));
  return { ...value, rows: rows.slice(Number(offset), Number(offset) + Number(limit)), total: rows.length };
}

// Sort, filter and search the groups of one update, as the server does.
function chosen(value, query) {
  const least = query.least === undefined ? -Infinity : Number(query.least);
  const most = query.most === undefined ? Infinity : Number(query.most);
  const word = (query.search ?? "").toLowerCase();
  const field = (one) => one[query.where] ?? one.rewards?.[query.where] ?? null;
  const isBounded = query.least !== undefined || query.most !== undefined;
  const isWithout = query.without === "1";
  const fits = (one) =>
    (!query.finish || one.finish === query.finish) &&
    (!isWithout || field(one) === null) &&
    (isWithout || !isBounded || (field(one) !== null && field(one) >= least && field(one) <= most)) &&
    one.text.toLowerCase().includes(word);
  const groups = value.groups
    .map((group) => ({ ...group, completions: group.completions.filter(fits) }))
    .filter((group) => group.completions.length);
  const [, sign, by] = (query.sort ?? "order").match(/^(-?)(.*)$/);
  if (by !== "order") groups.sort((a, b) => (sign ? -1 : 1) * (rank(a, by, sign) - rank(b, by, sign)));
  const offset = Number(query.offset ?? 0);
  return {
    ...value,
    groups: groups.slice(offset, offset + Number(query.limit ?? groups.length)),
    total: groups.length,
  };
}

function rank(group, by, sign) {
  if (by === "spread") return group.spread ?? 0;
  const values = group.completions.map((one) => one[by] ?? 0);
  return sign ? Math.max(...values) : Math.min(...values);
}
