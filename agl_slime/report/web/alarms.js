// Alarms with evidence and advice.

function alarmList(view, run) {
  view.append(h("h1", { tabindex: -1 }, "Alarms"));
  if (!run.alarms.length) return view.append(h("p", {}, "No alarms: every check of this run passed."));
  for (const alarm of run.alarms) {
    const evidence = [link(`step/${run.number}/${alarm.iteration}`, { class: "button" }, `step ${alarm.iteration}`)];
    if (alarm.rollout) evidence.push(" ", link(placeOf(run, alarm.rollout), { class: "button" }, "a rollout"));
    const chartHere = alarm.metric && run.columns.has(alarm.metric) ? chart(alarm.metric, linesOf([alarm.metric], [run]), 130) : null;
    view.append(h("article", { class: "alarm" }, h("h2", {}, alarm.kind), h("p", {}, `Iteration ${alarm.iteration}: ${alarm.text}`),
      h("p", {}, h("strong", {}, "Try: "), alarm.advice), h("p", {}, "Evidence: ", evidence), chartHere));
  }
}
