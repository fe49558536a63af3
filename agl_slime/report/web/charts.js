// Lines over iterations, drawn by uPlot. Colours distinguish runs, or the series of a single run.

const COLOURS = 8;
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (number) => theme(`--line${(number % COLOURS) + 1}`);
const drawn = new Set();
const COUNTS = /^(rollout\/(failed|dropped)|trace\/forks)\//; // counts by reason: missing means 0
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((n) => [1, 2, 5].map((step) => step * 10 ** n));

// `series`: [{run, name, label}] on a common axis of iterations.
function aligned(series) {
  const points = series.map(({ run, name }) => run.points(name));
  const steps = [...new Set([...series.flatMap(({ run }) => run.iterations), ...points.flat().map(([step]) => step)])].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const values = series.map(({ run, name }, i) => {
    const line = new Array(steps.length).fill(null);
    if (COUNTS.test(name)) run.iterations.forEach((step) => (line[place.get(step)] = 0));
    points[i].forEach(([step, value]) => (line[place.get(step)] = value));
    return line;
  });
  return [steps, ...values];
}

function description(series, [steps, ...lines]) {
  return series.map(({ label }, i) => {
    const points = lines[i].map((v, at) => [steps[at], v]).filter(([, v]) => v !== null);
    if (!points.length) return `${label}: no value`;
    const [first, last] = [points[0], points[points.length - 1]];
    return `${label}: ${num(first[1])} in iteration ${first[0]}, ${num(last[1])} in iteration ${last[0]}`;
  }).join("; ");
}

// The range of an axis, around a single value too.
function around(_, low, high) {
  if (low === null || (low === 0 && high === 0)) return [0, 1];
  if (low === high) return [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function chart(title, series, height = 180) {
  const several = new Set(series.map(({ run }) => run)).size > 1;
  const names = [...new Set(series.map(({ name }) => name))];
  const data = aligned(series);
  const box = h("div", { class: "plot", role: "img", "aria-label": `${title}. ${description(series, data)}` });
  const legend = h("ul", { class: "legend" });
  const figure = h("figure", {}, h("figcaption", {}, title), box, legend);
  const marks = series.map(({ run, name, label }) => {
    const mark = s("svg", { width: 18, height: 8, "aria-hidden": "true" });
    const value = h("span", { class: "value" });
    legend.append(h("li", {}, mark, label, " ", value));
    return { mark, value, width: names.length > 1 && name.endsWith("/reward_mean") ? 3 : 1.6, tint: several ? run.number : names.indexOf(name), dash: several && names.length > 1 ? names.indexOf(name) : 0 };
  });
  const show = (at) => marks.forEach(({ value }, i) => (value.textContent = at === null ? "" : num(data[i + 1][at])));

  const draw = () => {
    figure.plot?.destroy();
    const axis = { stroke: theme("--quiet"), grid: { stroke: theme("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const lines = marks.map(({ mark, width, tint, dash }, i) => {
      const dashes = [[], [6, 3], [2, 3], [8, 3, 2, 3]][dash % 4];
      mark.replaceChildren(s("line", { x1: 0, x2: 18, y1: 4, y2: 4, stroke: colour(tint), "stroke-width": 2.5, "stroke-dasharray": dashes.join(" ") }));
      return { stroke: colour(tint), width, dash: dashes, spanGaps: true, points: { show: data[i + 1].filter((v) => v !== null).length < 30, size: 5 } };
    });
    const width = Math.max(box.clientWidth, 240);
    figure.plot = new uPlot({
      width, height, legend: { show: false }, series: [{}, ...lines], scales: { x: { time: false }, y: { range: around } },
      axes: [{ ...axis, size: 26, incrs: WHOLE }, { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => num(v, 3)) }],
      cursor: { drag: { x: true, y: false }, sync: { key: "iterations", setSeries: false }, points: { size: 6 } },
      hooks: { setCursor: [(plot) => show(plot.cursor.idx ?? null)] },
    }, data, box);
    figure.plot.over.addEventListener("click", () => {
      const at = figure.plot.cursor.idx;
      const drag = figure.plot.select.width > 2;
      if (at !== null && at !== undefined && !drag) location.hash = `#step/${series[0].run.number}/${data[0][at]}`;
    });
  };
  figure.draw = draw;
  drawn.add(figure);
  seen.observe(figure);
  return figure;
}

// Charts are drawn when they become visible.
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting && !target.plot) target.draw();
}, { rootMargin: "200px" });

function redrawCharts() {
  for (const figure of drawn) if (figure.plot) figure.draw();
}

addEventListener("beforeprint", () => drawn.forEach((figure) => figure.plot || figure.draw()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(redrawCharts, 150);
});
