// Level 4: every token of a Sample with the log-probs of engine and trainer, advantage and weight version.

const CHUNK = 3000;
const TINTS = {
  mask: ["trained or context", (t) => (t.trained ? "t-on" : "t-off")],
  difference: ["trainer − engine log-prob (the trainer's after the batch's earlier steps)", (t) => scale(t.difference, [1e-6, 1e-4, 1e-2, 0.1, 1], true)],
  engine: ["engine log-prob", (t) => level(t.engine)],
  trainer: ["trainer log-prob", (t) => level(t.trainer)],
  advantage: ["advantage", (t) => scale(t.advantage, [1e-9, 0.25, 0.75, 1.25, 2], true)],
  version: ["weight version", (t) => (t.version === null ? "t-none" : `t-v${t.versionNumber % 6}`)],
};
let tinted = "mask";

// The magnitude in steps, the sign as the side of the scale.
function scale(value, edges) {
  if (value === null) return "t-none";
  const size = edges.filter((edge) => Math.abs(value) >= edge).length;
  return size ? `t-${value < 0 ? "m" : "p"}${size}` : "t-0";
}
const level = (value) => (value === null ? "t-none" : `t-l${[-0.01, -0.1, -0.7, -2, -5].filter((edge) => value <= edge).length}`);

function tokensOf(sample) {
  const ids = integers(sample.tokens), valid = (v) => (v === undefined || Number.isNaN(v) ? null : v);
  const [engine, trainer, advantage] = [sample.engine_log_probs, sample.trainer_log_probs, sample.advantages].map((text) => floats(text).map(valid));
  const response = ids.length - sample.prompt_length;
  const spans = [...sample.trained, ...sample.weight_versions.map((span) => span.slice(1))];
  const fits = sample.prompt_length >= 0 && spans.every(([start, end]) => 0 <= start && start <= end && end <= response + sample.left_out);
  if (!fits || [engine, trainer, advantage].some((each) => each.length !== response)) throw new Error("its tokens, spans, log-probs or advantages have different lengths: they are damaged");
  const versions = new Map();
  const tokens = ids.map((id, i) => {
    const at = i - sample.prompt_length;
    const t = { id, place: i, text: sample.pieces[i] ?? "", trained: false, version: null, response: at >= 0, engine: null, trainer: null, advantage: null, difference: null };
    if (at >= 0) Object.assign(t, { engine: valid(engine[at]), trainer: valid(trainer[at]), advantage: valid(advantage[at]) });
    if (t.engine !== null && t.trainer !== null) t.difference = t.trainer - t.engine;
    return t;
  });
  for (const [start, end] of sample.trained) for (let i = start; i < end; i++) if (tokens[sample.prompt_length + i]) tokens[sample.prompt_length + i].trained = true;
  for (const [version, start, end] of sample.weight_versions) {
    if (!versions.has(version)) versions.set(version, versions.size);
    for (let i = start; i < end; i++) if (tokens[sample.prompt_length + i]) Object.assign(tokens[sample.prompt_length + i], { version: String(version), versionNumber: versions.get(version) });
  }
  return tokens;
}

// The seven facts of a token.
function facts(t) {
  return [["token", `${JSON.stringify(t.text)} (id ${t.id}, place ${t.place})`], ["mask", t.trained ? "1: trained" : t.response ? "0: context" : "prompt: context"], ["engine log-prob", num(t.engine)],
    ["trainer log-prob", num(t.trainer)], ["difference", t.difference === null ? "–" : num(t.difference)], ["advantage", num(t.advantage)], ["weight version", t.version ?? "–"]];
}

async function tokens(view, run, id, number) {
  const record = await run.rollout(id);
  view.append(h("h1", { tabindex: -1 }, "Tokens of ", h("code", {}, id)));
  view.append(h("p", { class: "around" }, link(placeOf(run, id), {}, "↑ rollout"), " ",
    (record?.samples || []).map((_, i) => [i === number ? h("strong", {}, `Sample ${i + 1}`) : link(placeOf(run, id, i), {}, `Sample ${i + 1}`), " "])));
  const sample = record?.samples[number];
  if (!sample) return view.append(h("p", {}, "The tokens of this rollout are not here: it was not kept whole, or gave no Sample."));
  const all = tokensOf(sample);
  const trained = all.filter((t) => t.trained), differences = trained.map((t) => t.difference).filter((d) => d !== null);
  const largest = differences.reduce((a, d) => Math.max(a, Math.abs(d)), 0);
  view.append(h("dl", { class: "figures" }, named([["prompt", sample.prompt_length], ["response", all.length - sample.prompt_length], ["trained", trained.length], ["largest difference", differences.length ? num(largest) : "–"],
    ["stopped by", sample.stop_reason], ["ids from", sample.token_source], ["fork", sample.fork || "none"]].map(([k, v]) => [k, typeof v === "number" ? num(v) : v]))));
  const panel = h("dl", { class: "facts", id: "facts", "aria-live": "polite" });
  const box = h("div", { class: "tokens", role: "listbox", "aria-label": "Tokens; arrow keys move from one to the next", tabindex: 0, "aria-describedby": "facts" });
  const showFacts = (i) => panel.replaceChildren(...named(facts(all[i])));
  const paint = () => [...box.children].forEach((node, i) => node.className !== "more" && (node.className = `token ${TINTS[tinted][1](all[i])}`));
  const choice = h("fieldset", { class: "tints" }, h("legend", {}, "Colour by"), Object.entries(TINTS).map(([name, [label]]) => {
    const field = h("input", { type: "radio", name: "tint", id: `tint-${name}`, value: name });
    field.checked = name === tinted;
    field.addEventListener("change", () => { tinted = name; paint(); key.replaceChildren(...legendOf(all)); });
    return h("span", {}, field, h("label", { for: `tint-${name}` }, " ", label));
  }));
  const key = h("ul", { class: "legend" }, legendOf(all));
  view.append(choice, key, h("div", { class: "reading" }, box, h("aside", { "aria-label": "The token under the pointer" }, panel)));
  if (sample.left_out) view.append(h("p", {}, `${num(sample.left_out)} tokens after these are left out of the record.`));
  chooser(box, all, showFacts);
  showFacts(Math.min(sample.prompt_length, all.length - 1));
}

function legendOf(all) {
  const ranges = new Map();
  for (const t of all) {
    const name = TINTS[tinted][1](t);
    const value = { mask: t.trained ? "trained" : "context", version: t.version ?? "context", engine: t.engine, trainer: t.trainer, difference: t.difference, advantage: t.advantage }[tinted];
    const range = ranges.get(name) || [value, value];
    ranges.set(name, typeof value === "number" ? [Math.min(range[0], value), Math.max(range[1], value)] : [value, value]);
  }
  return [...ranges].map(([name, [low, high]]) => h("li", {}, h("span", { class: `swatch ${name}` }), low === null ? "context" : low === high ? num(low) : `${num(low)} … ${num(high)}`));
}

// Choice of one token by pointer or arrow keys.
function chooser(box, all, showFacts) {
  let chosen = -1;
  const choose = (i) => {
    if (i < 0 || i >= all.length) return;
    while (i >= box.querySelectorAll(".token").length) more();
    box.children[chosen]?.setAttribute("aria-selected", "false");
    chosen = i;
    const node = box.children[i];
    node.setAttribute("aria-selected", "true");
    box.setAttribute("aria-activedescendant", node.id);
    node.scrollIntoView({ block: "nearest" });
    showFacts(i);
  };
  const pointed = (event) => (event.target.classList.contains("token") ? Number(event.target.id.slice(1)) : -1);
  function more() {
    box.querySelector(".more")?.remove();
    const start = box.children.length;
    const part = document.createDocumentFragment();
    for (const t of all.slice(start, start + CHUNK)) {
      // marks for line ends, tabs, and tokens that only begin a character
      const text = t.text === "" ? "·" : t.text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
      part.append(h("span", { class: `token ${TINTS[tinted][1](t)}`, id: `k${t.place}`, role: "option", "aria-selected": "false" }, text));
    }
    box.append(part);
    const left = all.length - box.children.length;
    if (left > 0) box.append(h("span", { class: "more", role: "option", "aria-selected": "false" }, `… ${num(left)} more tokens: click, or press End`));
  }
  more();
  box.addEventListener("mouseover", (event) => pointed(event) >= 0 && showFacts(pointed(event)));
  box.addEventListener("click", (event) => (event.target.classList.contains("more") ? more() : choose(pointed(event))));
  box.addEventListener("focus", () => chosen < 0 && choose(Math.max(all.findIndex((t) => t.trained), 0)));
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (move) choose(Math.max(0, Math.min(all.length - 1, chosen + move)));
    else if (event.key === "Home") choose(0);
    else if (event.key === "End") choose(all.length - 1);
    else return;
    event.preventDefault();
  });
}
