// Level 3: one rollout: conversation, timeline, forks, outcome and reason.

// Reasons of forks whose names are not plain.
const FORKS = { dropped_thinking: "the template drops earlier thinking" };

async function rollout(view, run, id) {
  const member = run.byId.get(id);
  const record = await run.rollout(id);
  view.append(h("h1", { tabindex: -1 }, "Rollout ", h("code", {}, id)));
  if (!member && !record) return view.append(h("p", {}, "No such rollout was recorded."));
  view.append(siblings(run, member), outcome(run, member, record));
  if (!record) {
    const why = run.kept.has(id) ? "is in rollouts.jsonl and was left out of this file to keep it small; agl-slime view shows it" : "was not kept whole (--keep-rollouts all keeps every one)";
    return view.append(h("p", {}, `This rollout ${why}.`));
  }
  view.append(sampleLinks(run, id, record), timeline(record), forks(record), conversation(record));
}

function siblings(run, member) {
  if (!member) return null;
  const { group } = member;
  const others = group.members.filter((other) => other !== member);
  return h("p", { class: "around" }, link(`step/${run.number}/${group.iteration}`, {}, `↑ step ${group.iteration}`), others.length ? " · same task: " : "",
    others.map((other) => [link(placeOf(run, other.id), { class: run.isKept(other.id) ? "kept" : "" }, typeof other.reward === "number" ? num(other.reward, 3) : other.outcome), " "]));
}

function outcome(run, member, record) {
  const word = record?.outcome || member.outcome;
  const group = member?.group;
  const why = [record?.reason, record?.message].filter(Boolean).join(": ") || (member && word === "filtered" ? fate(group)[1] : member?.why) || { trained: "delivered to the trainer", ready: "ready; not reported as trained" }[word] || "";
  const rewards = Object.entries(record?.rewards || {}).filter(([name]) => name !== "primary").map(([name, value]) => `${name} ${num(value)}`);
  const facts = [["reward", num(record?.reward ?? member?.reward) + (rewards.length ? ` (${rewards.join(", ")})` : "")], ["task", record?.instance_id ?? group?.instance], ["source", record?.source ?? group?.source],
    ["stopped by", record?.stop_reason], ["sampled tokens", num(record?.tokens ?? member?.tokens)], ["model calls", record?.turns?.length ?? member?.turns], ["kept as", record?.label], ["record of verifiers", record?.trace]];
  return h("section", { "aria-label": "Outcome" }, h("p", {}, badge(word), " ", why),
    h("dl", { class: "figures" }, named(facts.filter(([, v]) => v !== null && v !== undefined && v !== ""))));
}

function sampleLinks(run, id, record) {
  if (!record.samples.length) return h("p", {}, "It has no Sample, and so no tokens to show.");
  const name = (sample, i) => (record.samples.length > 1 ? `Sample ${i + 1}${sample.fork ? ` (fork: ${sample.fork})` : ""}` : "show every token");
  return h("p", {}, "Tokens: ", record.samples.map((sample, i) => [link(placeOf(run, id, i), { class: "button" }, name(sample, i)), " "]));
}

// Time waiting for a runner, in model calls, and between them (agent, tools, judge).
function timeline(record) {
  const time = record.timeline;
  if (!time || time.ended === null || time.ended === undefined || time.started === null) return null;
  const parts = [["waiting", 0, time.started]];
  let at = time.started;
  for (const [start, end] of [...time.calls].sort((a, b) => a[0] - b[0])) {
    if (start > at) parts.push(["tools", at, start]);
    parts.push(["model", Math.max(start, 0), end]);
    at = Math.max(at, end);
  }
  if (time.ended > at) parts.push(["tools", at, time.ended]);
  const whole = Math.max(time.ended, at, 1e-6);
  const words = { waiting: "waiting for a runner", model: "model", tools: "agent, tools, judge" };
  const sums = {};
  const plot = s("svg", { viewBox: "0 0 1000 34", preserveAspectRatio: "none", class: "timeline", "aria-hidden": "true" });
  for (const [kind, start, end] of parts) {
    sums[kind] = (sums[kind] || 0) + end - start;
    plot.append(s("rect", { x: (1000 * start) / whole, y: kind === "model" ? 2 : 8, width: Math.max((1000 * (end - start)) / whole, 1), height: kind === "model" ? 30 : 18, class: `time ${kind}` }, s("title", {}, `${words[kind]}: ${seconds(end - start)}`)));
  }
  const rows = parts.map(([kind, start, end]) => [words[kind], seconds(start), seconds(end - start)]);
  return h("section", {}, h("h2", {}, "Timeline"), plot,
    h("ul", { class: "legend" }, Object.entries(sums).map(([kind, sum]) => h("li", {}, h("span", { class: `swatch ${kind}` }), `${words[kind]} ${seconds(sum)}`))),
    h("details", {}, h("summary", {}, "As a table"), table(["What", "From", "For"], rows, { label: "Timeline" })));
}

// The tree of calls: a call continues the last one of whose answer it kept tokens. Each fork is a branch.
function forks(record) {
  const parents = [], children = new Map();
  record.turns.forEach((turn, i) => {
    let at = turn.base !== null && turn.base < i ? turn.base : -1;
    while (at >= 0 && turn.kept_tokens <= record.turns[at].prompt_tokens) at = parents[at];
    parents.push(at);
    children.set(at, [...(children.get(at) || []), i]);
  });
  const node = (i) => {
    const turn = record.turns[i];
    const text = [`call ${i + 1}: ${num(turn.prompt_tokens)} prompt tokens, ${num(turn.tokens)} sampled, ${seconds(turn.seconds)}, ended by ${turn.finish}`];
    if (turn.fork) text.push(" ", badge("fork", `fork: ${FORKS[turn.fork] ?? turn.fork}`), ` kept ${num(turn.kept_tokens)} tokens`);
    if (turn.untrained) text.push(" ", badge("masked", `not trained: ${turn.untrained}`));
    return [h("li", {}, text), chain(i)];
  };
  // calls in sequence stay flat: deep nesting would not fit the screen
  const chain = (i) => {
    const next = children.get(i) || [];
    return next.length === 1 && !record.turns[next[0]].fork ? node(next[0]) : next.length ? h("li", { class: "branch" }, h("ul", {}, next.map(node))) : null;
  };
  if (!record.turns.length) return null;
  const forked = record.turns.some((turn) => turn.fork);
  return h("section", {}, h("h2", {}, forked ? "Forks" : "Model calls"), h("ul", { class: "tree" }, (children.get(-1) || []).map(node)));
}

function conversation(record) {
  const parts = [h("h2", {}, "Conversation")];
  if (record.task !== null && record.task !== undefined) parts.push(h("details", {}, h("summary", {}, "Task"), longText(JSON.stringify(record.task, null, 2))));
  if (record.tools) parts.push(h("details", {}, h("summary", {}, "Tools"), longText(JSON.stringify(record.tools, null, 2))));
  if (!record.messages.length) parts.push(h("p", {}, "Its messages were not recorded."));
  else if (record.samples.length > 1) parts.push(h("p", { class: "quiet" }, "The last branch; earlier branches are in the tokens of their Samples."));
  for (const message of record.messages) parts.push(messageBlock(message));
  return h("section", { "aria-label": "Conversation" }, parts);
}

function messageBlock(message) {
  const role = String(message.role || "?");
  const parts = [h("h3", {}, role, message.name ? ` (${message.name})` : "")];
  const content = message.content;
  if (message.reasoning_content) parts.push(h("details", {}, h("summary", {}, "Reasoning"), longText(message.reasoning_content)));
  if (typeof content === "string" && content) parts.push(longText(content));
  else if (content !== null && content !== undefined && content !== "") parts.push(longText(JSON.stringify(content, null, 2)));
  for (const call of message.tool_calls || []) {
    const made = call.function || call;
    const given = typeof made.arguments === "string" ? made.arguments : JSON.stringify(made.arguments, null, 2);
    parts.push(h("div", { class: "call" }, h("p", {}, "calls ", h("code", {}, String(made.name ?? "?"))), longText(given ?? "")));
  }
  return h("article", { class: `message ${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}` }, parts);
}
