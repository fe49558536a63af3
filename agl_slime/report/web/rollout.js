// Level 3: one rollout: its conversation, its timeline, its forks, its outcome and why.

// Reasons of forks that their names do not say.
const FORKS = { dropped_thinking: "the template drops earlier thinking" };

async function rollout(view, run, id) {
  const member = run.byId.get(id);
  const told = await run.rollout(id);
  view.append(h("h1", { tabindex: -1 }, "Rollout ", h("code", {}, id)));
  if (!member && !told) return view.append(h("p", {}, "No such rollout was recorded."));
  view.append(siblings(run, member), outcome(run, member, told));
  if (!told) {
    const why = run.kept.has(id) ? "is in rollouts.jsonl and was left out of this file to keep it small; agl-slime view shows it" : "was not kept whole (--keep-rollouts all keeps every one)";
    return view.append(h("p", {}, `This rollout ${why}.`));
  }
  view.append(sampleLinks(run, id, told), timeline(told), forks(told), conversation(told));
}

function siblings(run, member) {
  if (!member) return null;
  const { group } = member;
  const others = group.members.filter((other) => other !== member);
  return h("p", { class: "around" }, link(`step/${run.number}/${group.iteration}`, {}, `↑ step ${group.iteration}`), others.length ? " · same task: " : "",
    others.map((other) => [link(placeOf(run, other.id), { class: run.isKept(other.id) ? "kept" : "" }, typeof other.reward === "number" ? num(other.reward, 3) : other.outcome), " "]));
}

function outcome(run, member, told) {
  const word = told?.outcome || member.outcome;
  const group = member?.group;
  const why = [told?.reason, told?.message].filter(Boolean).join(": ") || (member && word === "filtered" ? fate(group)[1] : member?.why) || { trained: "delivered to the trainer", ready: "fit to train on; nobody told of it" }[word] || "";
  const rewards = Object.entries(told?.rewards || {}).filter(([name]) => name !== "primary").map(([name, value]) => `${name} ${num(value)}`);
  const facts = [["reward", num(told?.reward ?? member?.reward) + (rewards.length ? ` (${rewards.join(", ")})` : "")], ["task", told?.instance_id ?? group?.instance], ["source", told?.source ?? group?.source],
    ["stopped by", told?.stop_reason], ["sampled tokens", num(told?.tokens ?? member?.tokens)], ["model calls", told?.turns?.length ?? member?.turns], ["kept as", told?.label], ["record of verifiers", told?.trace]];
  return h("section", { "aria-label": "Outcome" }, h("p", {}, badge(word), " ", why),
    h("dl", { class: "figures" }, named(facts.filter(([, v]) => v !== null && v !== undefined && v !== ""))));
}

function sampleLinks(run, id, told) {
  if (!told.samples.length) return h("p", {}, "It gave no Sample: there are no tokens to show.");
  const name = (sample, i) => (told.samples.length > 1 ? `Sample ${i + 1}${sample.fork ? ` (fork: ${sample.fork})` : ""}` : "show every token");
  return h("p", {}, "Tokens: ", told.samples.map((sample, i) => [link(placeOf(run, id, i), { class: "button" }, name(sample, i)), " "]));
}

// Model time, waiting for a runner, and what is between calls: the agent, its tools and its judge.
function timeline(told) {
  const time = told.timeline;
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

// Which call went on from which: from the last one of whose answer it kept something. A fork is a branch of its own.
function forks(told) {
  const parents = [], children = new Map();
  told.turns.forEach((turn, i) => {
    let at = turn.base !== null && turn.base < i ? turn.base : -1;
    while (at >= 0 && turn.kept_tokens <= told.turns[at].prompt_tokens) at = parents[at];
    parents.push(at);
    children.set(at, [...(children.get(at) || []), i]);
  });
  const node = (i) => {
    const turn = told.turns[i];
    const text = [`call ${i + 1}: ${num(turn.prompt_tokens)} prompt tokens, ${num(turn.tokens)} sampled, ${seconds(turn.seconds)}, ended by ${turn.finish}`];
    if (turn.fork) text.push(" ", badge("fork", `fork: ${FORKS[turn.fork] ?? turn.fork}`), ` kept ${num(turn.kept_tokens)} tokens`);
    if (turn.untrained) text.push(" ", badge("masked", `not trained: ${turn.untrained}`));
    return [h("li", {}, text), chain(i)];
  };
  // a straight line of calls stays flat: deep nesting would run out of the screen
  const chain = (i) => {
    const next = children.get(i) || [];
    return next.length === 1 && !told.turns[next[0]].fork ? node(next[0]) : next.length ? h("li", { class: "branch" }, h("ul", {}, next.map(node))) : null;
  };
  if (!told.turns.length) return null;
  const forked = told.turns.some((turn) => turn.fork);
  return h("section", {}, h("h2", {}, forked ? "Forks" : "Model calls"), h("ul", { class: "tree" }, (children.get(-1) || []).map(node)));
}

function conversation(told) {
  const parts = [h("h2", {}, "Conversation")];
  if (told.task !== null && told.task !== undefined) parts.push(h("details", {}, h("summary", {}, "Task"), longText(JSON.stringify(told.task, null, 2))));
  if (told.tools) parts.push(h("details", {}, h("summary", {}, "Tools"), longText(JSON.stringify(told.tools, null, 2))));
  if (!told.messages.length) parts.push(h("p", {}, "Its messages were not recorded."));
  else if (told.samples.length > 1) parts.push(h("p", { class: "quiet" }, "As it was gone on with last; what was forked from is in the tokens of its Sample."));
  for (const message of told.messages) parts.push(spoken(message));
  return h("section", { "aria-label": "Conversation" }, parts);
}

function spoken(message) {
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
