// Elements, numbers and packed arrays. Model output passes through `h` only, which makes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.setAttribute("class", value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const link = (href, attributes, ...children) => h("a", { href: "#" + href, ...attributes }, ...children);

const whole = new Intl.NumberFormat("en").format; // made once: formatters are expensive
const rounded = new Intl.NumberFormat("en", { maximumFractionDigits: 6 }).format;

// Pairs of name and value as a definition list.
const named = (pairs) => pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));

// The hash of a rollout, or of the tokens of one of its Samples.
const placeOf = (run, id, sample) => `${sample === undefined ? "rollout" : "token"}/${run.number}/${encodeURIComponent(id)}${sample === undefined ? "" : `/${sample}`}`;

// 0.1234, 12.3, 1,234,567, 1.2e-6; a dash for unknown values
function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e9) return value.toExponential(2);
  if (Number.isInteger(value)) return whole(value);
  return rounded(Number(value.toPrecision(digits)));
}

const seconds = (value) => (value === null || value === undefined ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

function bytesOf(text) {
  let raw;
  try {
    raw = atob(text || "");
    if (raw.length % 4) throw new Error();
  } catch {
    throw new Error("an array of its tokens is damaged (no base64 of 32-bit numbers)");
  }
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new DataView(bytes.buffer);
}

function unpack(text, read) {
  const view = bytesOf(text);
  return Array.from({ length: view.byteLength >> 2 }, (_, i) => view[read](4 * i, true));
}

const floats = (text) => unpack(text, "getFloat32");
const integers = (text) => unpack(text, "getInt32");

// The start of a long text, and a button for more: a megabyte at once would block the page.
const LONGEST = 20000;
function longText(text, attributes) {
  const shown = String(text);
  const block = h("pre", attributes);
  if (shown.length <= LONGEST) return fill(block, {}, [shown]);
  let end = cut(shown, LONGEST);
  const more = h("button", { type: "button", onclick: () => grow() });
  const label = () => (more.textContent = `Show more (${num(shown.length - end)} characters are left)`);
  function grow() {
    const next = cut(shown, end + 10 * LONGEST);
    block.insertBefore(document.createTextNode(shown.slice(end, next)), more);
    end = next;
    end < shown.length ? label() : more.remove();
  }
  label();
  return fill(block, {}, [shown.slice(0, end), more]);
}

// Never between the halves of a surrogate pair.
const cut = (text, at) => (at < text.length && /[\uDC00-\uDFFF]/.test(text[at]) ? at + 1 : Math.min(at, text.length));

function table(heads, rows, attributes) {
  const head = h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text))));
  const body = h("tbody", {}, rows.map((row) => h("tr", row.attributes, (row.cells || row).map((cell, i) => h("td", { "data-label": heads[i] }, cell)))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": attributes.label }, h("table", {}, h("caption", { class: "quiet" }, attributes.label), head, body));
}

const badge = (word, text) => h("span", { class: `badge ${word}` }, text || word);
