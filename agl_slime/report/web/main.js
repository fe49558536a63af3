// Routes, the header, and updates of a run in progress.

const LEVELS = [["trend", "Trend"], ["step", "Steps"], ["rollouts", "Rollouts"], ["alarms", "Alarms"]];

function header(kind, number) {
  const run = App.runs[number];
  const last = run?.steps[run.steps.length - 1] ?? 1;
  const href = { trend: "trend", step: `step/${number}/${last}`, rollouts: `rollouts/${number}`, alarms: `alarms/${number}` };
  const belongs = { rollout: "rollouts", token: "rollouts" }[kind] || kind;
  const alarms = run?.alarms.length ? ` (${run.alarms.length})` : "";
  document.getElementById("levels").replaceChildren(h("ul", {}, LEVELS.map(([name, text]) => h("li", {}, link(href[name], { "aria-current": name === belongs ? "page" : null }, text + (name === "alarms" ? alarms : ""))))));
  const place = document.getElementById("runs");
  if (App.runs.length < 2) return place.replaceChildren(badge(run.state.word), " ", run.name);
  place.replaceChildren(h("fieldset", {}, h("legend", {}, "Runs"), App.runs.map((each) => {
    const field = h("input", { type: "checkbox", id: `run${each.number}` });
    field.checked = App.shown.has(each.number);
    field.addEventListener("change", () => {
      field.checked ? App.shown.add(each.number) : App.shown.delete(each.number);
      show();
    });
    return h("span", { class: "one" }, field, h("label", { for: field.id }, " ", each.name, " "), badge(each.state.word), " ", link(`rollouts/${each.number}`, {}, "rollouts"));
  })));
}

let showing = 0;
async function show({ keep = false } = {}) {
  const turn = ++showing;
  const [kind, number, ...rest] = (location.hash.slice(1) || "trend").split("/");
  const run = App.runs[Number(number) || 0];
  const view = h("div", { class: `view of-${kind}` });
  const release = releaseLater();
  try {
    if (!run) throw new Error("there is no such run on this page");
    const id = decodeURIComponent(rest[0] || "");
    if (kind === "step") step(view, run, Number(rest[0]));
    else if (kind === "rollouts") rolloutList(view, run);
    else if (kind === "rollout") await rollout(view, run, id);
    else if (kind === "token") await tokens(view, run, id, Number(rest[1]) || 0);
    else if (kind === "alarms") alarmList(view, run);
    else trend(view);
  } catch (error) { // a mistyped address, a damaged record
    view.replaceChildren(h("h1", { tabindex: -1 }, "This cannot be shown"), h("p", {}, `${location.hash}: ${error.message}. The address may be mistyped, or a record damaged: agl-slime audit finds what is.`));
  }
  if (turn !== showing) return; // another page was opened meanwhile
  release();
  const main = document.getElementById("main");
  const scrolled = [scrollX, scrollY];
  main.replaceChildren(view);
  header(LEVELS.some(([name]) => name === kind) || ["rollout", "token"].includes(kind) ? kind : "trend", run?.number ?? 0);
  document.title = `agl-slime: ${run?.name ?? ""} – ${view.querySelector("h1")?.textContent ?? ""}`;
  if (keep) return scrollTo(...scrolled);
  scrollTo(0, 0);
  if (App.started) view.querySelector("h1")?.focus({ preventScroll: true });
  App.started = true;
}

// Releases the current charts once the next page is shown.
function releaseLater() {
  const before = [...drawn];
  return () => before.forEach((figure) => {
    seen.unobserve(figure);
    figure.plot?.destroy();
    drawn.delete(figure);
  });
}

function addNews(parts) {
  parts.forEach((part, i) => {
    if (!part) return;
    if (!App.runs[i]) {
      App.runs[i] = new Run(i);
      App.shown.add(i);
    }
    App.runs[i].add(part);
  });
}

// Pages of single rollouts stay unchanged; others are redrawn with the changes.
function update(parts) {
  addNews(parts);
  const kind = (location.hash.slice(1) || "trend").split("/")[0];
  const run = App.runs[0];
  document.getElementById("live").textContent = `Live: iteration ${run.iterations[run.iterations.length - 1] ?? 0}, ${num(run.members.length)} rollouts. ${run.state.text}`;
  const busy = document.activeElement?.matches("main select, main input");
  if (!App.started || (["trend", "step", "alarms"].includes(kind) && !busy)) return show({ keep: App.started });
  if (kind === "rollouts") App.refresh(); // keeps the scroll position and the filter
  header(kind, run.number);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash names the page
  document.querySelector("h1")?.focus();
});

async function start() {
  const given = document.getElementById("runs-data");
  App.live = !given;
  addEventListener("hashchange", () => App.runs.length && show());
  if (App.live && document.querySelector("meta[name=follow]")) return follow();
  addNews(given ? JSON.parse(given.textContent) : await (await fetch("data")).json());
  await show();
}

// The first message is complete, also after a reconnection.
function follow() {
  const source = new EventSource("events");
  source.onmessage = (event) => update(JSON.parse(event.data));
  source.onerror = () => {
    const ended = App.runs.length && App.runs.every((run) => run.state.word !== "running");
    document.getElementById("live").textContent = ended ? App.runs[0].state.text : "The server does not answer; the page shows the last state.";
  };
}

start();
