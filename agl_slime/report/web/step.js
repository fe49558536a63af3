// Level 2: the groups of one iteration, as a scatter and as a table.

function step(view, run, iteration) {
  const steps = run.steps;
  const groups = run.byIteration.get(iteration) || [];
  const at = steps.indexOf(iteration);
  view.append(h("h1", { tabindex: -1 }, `Step ${iteration}`), h("p", { class: "around" },
    at > 0 ? link(`step/${run.number}/${steps[at - 1]}`, { rel: "prev" }, `← step ${steps[at - 1]}`) : null, " ",
    at >= 0 && at < steps.length - 1 ? link(`step/${run.number}/${steps[at + 1]}`, { rel: "next" }, `step ${steps[at + 1]} →`) : null));
  view.append(stepFigures(run, iteration, groups));
  if (!groups.length) return view.append(h("p", {}, "No group of this iteration was recorded (groups.jsonl)."));
  view.append(scatter(run, groups), groupTable(run, groups));
}

function stepFigures(run, iteration, groups) {
  const fates = groups.map(fate);
  const zero = groups.filter((group) => spread(group).same).length;
  const figures = [["reward mean", run.metric("rollout/reward_mean", iteration)], ["groups", groups.length],
    ["trained", fates.filter(([word]) => word === "trained").length], ["dropped", fates.filter(([word]) => word !== "trained" && word !== "ready").length],
    ["without spread", zero], ["failed rollouts", run.metric("rollout/failed", iteration)], ["loss", run.metric("train/loss", iteration)],
    ["seconds", run.metric("perf/iteration_s", iteration)]];
  return h("dl", { class: "figures" }, named(figures.map(([name, value]) => [name, num(value)])));
}

// Rewards of members, a column per group: squares for a group without spread, hollow marks for a dropped one.
function scatter(run, groups) {
  const each = Math.min(56, Math.max(18, (innerWidth - 120) / groups.length));
  const width = Math.max(320, groups.length * each + 60), height = 190, left = 46, bottom = 24;
  const rewards = groups.flatMap((group) => spread(group).rewards);
  const low = Math.min(0, ...rewards), high = Math.max(1e-9, ...rewards);
  const y = (value) => 10 + (1 - (value - low) / (high - low || 1)) * (height - bottom - 20);
  const x = (i) => left + 10 + ((width - left - 20) * (i + 0.5)) / groups.length;
  const plot = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Rewards of the members of ${groups.length} groups; the table below has them as numbers` });
  for (const value of [low, (low + high) / 2, high]) {
    plot.append(s("line", { x1: left, x2: width - 6, y1: y(value), y2: y(value), class: "gridline" }), s("text", { x: left - 6, y: y(value) + 4, class: "tick", "text-anchor": "end" }, num(value, 2)));
  }
  groups.forEach((group, i) => {
    const { same } = spread(group);
    const [word] = fate(group);
    const counts = new Map();
    for (const member of group.members) {
      if (typeof member.reward !== "number") continue;
      const n = counts.get(member.reward) || 0;
      counts.set(member.reward, n + 1);
      const at = { class: `dot ${word}${same ? " same" : ""}`, tabindex: -1 };
      const place = { cx: x(i) + (n % 4) * 3 - 4, cy: y(member.reward) - Math.floor(n / 4) * 3 };
      const dot = same ? s("rect", { ...at, x: place.cx - 3.5, y: place.cy - 3.5, width: 7, height: 7 }) : s("circle", { ...at, ...place, r: 4 });
      dot.append(s("title", {}, `group ${group.instance ?? group.id}: reward ${num(member.reward)}, ${member.outcome}${same ? ", no spread" : ""}`));
      dot.addEventListener("click", () => (location.hash = "#" + placeOf(run, member.id)));
      plot.append(dot);
    }
  });
  const key = h("p", { class: "quiet" }, "A column per group, a dot per rollout. Squares: all rewards of the group are the same, so it has no advantage. Hollow: not trained.");
  return h("figure", { class: "wide" }, h("figcaption", {}, "Rewards by group"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Rewards by group" }, plot), key);
}

function groupTable(run, groups) {
  const heads = ["Task", "Outcome", "Mean", "Spread", "Age", "Weights", "Rollouts (reward)"];
  const rows = groups.map((group) => {
    const { average, deviation, same } = spread(group);
    const [word, text] = fate(group);
    const members = group.members.map((member) => [link(placeOf(run, member.id),
      { class: `member ${member.outcome}${run.isKept(member.id) ? " kept" : ""}`, title: `${member.id}: ${member.outcome}${member.why ? ` (${member.why})` : ""}` },
      typeof member.reward === "number" ? num(member.reward, 3) : member.why || member.outcome), " "]);
    const age = group.iteration - group.collected;
    return [group.instance ?? group.id.slice(0, 8), [badge(word), " ", text, group.source ? ` · ${group.source}` : ""], num(average), same ? badge("same", "none") : num(deviation), `${age} iteration${age === 1 ? "" : "s"}`, group.versions.join(", ") || "–", members];
  });
  return table(heads, rows, { label: "Groups of this step; rollouts that are kept whole are in bold" });
}
