// Where the page is: the fragment of its address, `#/run/ID/STAGE/update/7?sort=reward`.

export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { parts, query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function link(parts, query = {}) {
  const given = Object.entries(query).filter(
    ([, value]) => value !== "" && value !== null && value !== undefined && value !== false,
  );
  const path = `#/${parts.map(encodeURIComponent).join("/")}`;
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

// Go to the same place with other choices, which draws it anew.
export function choose(changes) {
  const { parts, query } = here();
  location.hash = link(parts, { ...query, ...changes });
}

// Note choices in the address; what shows them has been drawn already.
export function note(changes) {
  const { parts, query } = here();
  history.replaceState(null, "", link(parts, { ...query, ...changes }));
}
