// Level 1: the metrics of metrics.jsonl over iterations.

const PANELS = [
  ["Reward", ["rollout/reward_mean", "rollout/reward_min", "rollout/reward_max", "rollout/reward_std"]],
  ["Reward by task source", [/^reward_of\//]],
  ["Named rewards", [/^reward\//]],
  ["Validation", ["val/reward_mean"]],
  ["Validation rollouts that failed", ["val/failed", /^val\/failed\//]],
  ["Sampled tokens per rollout", ["rollout/response_tokens_mean", "rollout/response_tokens_mean_trained", "rollout/response_tokens_mean_dropped"]],
  ["Turns per rollout", ["rollout/turns_mean"]],
  ["Failures by reason", ["rollout/failed", /^rollout\/failed\//]],
  ["Groups: ready, dropped, without spread", ["rollout/groups_ready", "rollout/groups_dropped", "rollout/groups_zero_variance", /^rollout\/dropped\//]],
  ["Cut off", ["rollout/truncated", "rollout/cancelled_stragglers"]],
  ["Entropy", ["train/entropy"]],
  ["KL", [/^train\/.*kl/]],
  ["Share of clipped tokens", [/clip_?(frac|fraction|ratio)/]],
  ["Log-prob difference of engine and trainer", ["train/logprob_diff_max", "train/logprob_diff_mean"]],
  ["Loss", ["train/loss"]],
  ["Gradient norm", [/grad_norm/]],
  ["Staleness in weight versions", ["rollout/staleness_mean", "rollout/staleness_max", "val/lag"]],
  ["Share of trained tokens by staleness", [/^train\/share\/staleness_/]],
  ["Seconds by phase", [/^perf\/.*(?<!_per)_s$/]],
  ["Sampled tokens per second", ["perf/tokens_per_s"]],
];

const picked = [];
const matches = (name, rule) => (typeof rule === "string" ? name === rule : rule.test(name));
const panels = (names) => PANELS.map(([title, rules]) => [title, [...new Set(rules.flatMap((rule) => names.filter((name) => matches(name, rule))))]]);
const short = (name) => name.replace(/^(rollout|train|perf|val|reward|reward_of)\//, "");

function metricNames(runs) {
  return [...new Set(runs.flatMap((run) => ["val/reward_mean", "val/failed", ...run.columns.keys()].filter((name) => run.points(name).length)))].sort();
}

function linesOf(names, runs) {
  const several = runs.length > 1;
  return names.flatMap((name) => runs.filter((run) => run.points(name).length)
    .map((run) => ({ run, name, label: several ? `${run.name}: ${short(name)}` : short(name) })));
}

function trend(view) {
  const runs = App.runs.filter((run) => App.shown.has(run.number));
  const names = metricNames(runs);
  view.append(h("h1", { tabindex: -1 }, "Trend"));
  runs.forEach((run) => view.append(about(run)));
  if (!names.length) return view.append(h("p", {}, "No iteration has been finished yet."));
  view.append(jump(runs));
  const grid = h("div", { class: "charts" });
  for (const [title, metrics] of panels(names)) {
    const lines = linesOf(metrics.slice(0, 12), runs);
    if (lines.length) grid.append(chart(title, lines));
  }
  view.append(picker(names, runs), grid);
}

// Any metric of metrics.jsonl, one chart each.
function picker(names, runs) {
  const charts = h("div", { class: "charts" });
  const choose = h("select", { id: "metric" }, h("option", { value: "" }, "choose …"), names.map((name) => h("option", { value: name }, name)));
  const add = (name) => {
    const lines = linesOf([name], runs);
    if (!lines.length) return;
    const card = h("div", { class: "picked" }, chart(name, lines));
    card.append(h("button", { type: "button", onclick: () => { picked.splice(picked.indexOf(name), 1); card.remove(); } }, `Remove ${name}`));
    charts.append(card);
  };
  choose.addEventListener("change", () => {
    if (choose.value && !picked.includes(choose.value)) {
      picked.push(choose.value);
      add(choose.value);
    }
    choose.value = "";
  });
  picked.forEach(add);
  return h("section", { "aria-label": "Any metric" }, h("p", {}, h("label", { for: "metric" }, "Draw any metric: "), choose), charts);
}

// A way to a step without a chart.
function jump(runs) {
  return h("p", { class: "jump" }, runs.map((run) => {
    const steps = run.steps;
    const choose = h("select", { id: `jump${run.number}` }, steps.map((step) => h("option", { value: step }, step)));
    choose.value = steps[steps.length - 1];
    const go = h("button", { type: "button", onclick: () => (location.hash = `#step/${run.number}/${choose.value}`) }, "Open step");
    return h("span", {}, h("label", { for: `jump${run.number}` }, runs.length > 1 ? `${run.name}, iteration ` : "Iteration "), choose, " ", go, " ");
  }), h("span", { class: "quiet" }, "or click a point of a chart"));
}

function about(run) {
  const facts = [["agent", run.config.agent], ["model", run.config.model_path], ["prompts per iteration", run.config.rollout_batch_size],
    ["rollouts per prompt", run.config.n_samples_per_prompt], ["iterations", run.config.num_iterations], ["seed", run.config.seed]];
  return h("section", { class: "about", "aria-label": `Run ${run.name}` },
    h("p", {}, badge(run.state.word), " ", h("strong", {}, run.name), " ", run.headline),
    h("p", { class: "quiet" }, run.state.text),
    run.damage.map((text) => h("p", { class: "damage" }, badge("damaged"), " ", text)),
    run.absent.map((text) => h("p", { class: "quiet" }, badge("not written"), " ", text)),
    run.left_out ? h("p", { class: "quiet" }, run.left_out) : null,
    run.alarms.length ? h("p", {}, link(`alarms/${run.number}`, {}, `${run.alarms.length} alarm${run.alarms.length > 1 ? "s" : ""}`), ": ", [...new Set(run.alarms.map((a) => a.kind))].join(", ")) : null,
    h("p", { class: "quiet" }, facts.filter(([, v]) => v !== undefined && v !== null).map(([k, v]) => `${k} ${v}`).join(" · ")));
}
