// All rollouts of a run as one table. Only visible rows are elements: 64,000 would block the page.

const ROW = 30;
const FIELDS = [["Iteration", (m) => m.group.iteration], ["Task", (m) => m.group.instance ?? ""], ["Rollout", (m) => m.id], ["Reward", (m) => m.reward],
  ["Outcome", (m) => m.outcome], ["Reason", (m) => m.why || (m.outcome === "filtered" ? m.group.code : "")], ["Tokens", (m) => m.tokens], ["Turns", (m) => m.turns], ["Samples", (m) => m.samples]];
const wanted = { outcome: "", text: "", kept: false, by: 0, down: false };

function rolloutList(view, run) {
  view.append(h("h1", { tabindex: -1 }, "Rollouts"));
  const count = h("p", { role: "status" });
  const outcomes = [...new Set(run.members.map((m) => m.outcome))].sort();
  const choose = h("select", { id: "outcome" }, h("option", { value: "" }, "all"), outcomes.map((word) => h("option", { value: word }, word)));
  const find = h("input", { id: "find", type: "search", placeholder: "id, task, reason, messages", value: wanted.text });
  const kept = h("input", { id: "kept", type: "checkbox" });
  choose.value = outcomes.includes(wanted.outcome) ? wanted.outcome : "";
  kept.checked = wanted.kept;
  const grid = virtualTable(run);
  let searches = 0;
  const refresh = async () => {
    Object.assign(wanted, { outcome: choose.value, text: find.value, kept: kept.checked });
    const search = ++searches;
    const ids = wanted.text ? await run.idsWith(wanted.text) : new Set();
    if (search !== searches) return; // another text was entered meanwhile
    const matching = select(run, ids);
    count.textContent = `${num(matching.length)} of ${num(run.members.length)} rollouts; ${num(run.kept.size)} are kept whole.`;
    grid.show(matching);
  };
  [choose, kept].forEach((field) => field.addEventListener("change", refresh));
  find.addEventListener("input", refresh);
  grid.sorted = App.refresh = refresh;
  view.append(h("p", { class: "filters" }, h("label", { for: "outcome" }, "Outcome "), choose, " ", h("label", { for: "find" }, "Find "), find, " ", kept, h("label", { for: "kept" }, " kept whole only")), count, grid.box);
  refresh();
}

function select(run, ids) {
  const text = wanted.text.toLowerCase();
  const hit = (m) => [m.id, m.group.instance, m.group.source, m.why, m.group.code].some((part) => part && String(part).toLowerCase().includes(text));
  const matching = run.members.filter((m) => (!wanted.outcome || m.outcome === wanted.outcome) && (!wanted.kept || run.isKept(m.id)) && (!text || ids.has(m.id) || hit(m)));
  const key = FIELDS[wanted.by][1];
  const order = (a, b) => {
    const [p, q] = [key(a), key(b)];
    if (p === q) return a.number - b.number;
    if (p === null || p === undefined) return 1;
    if (q === null || q === undefined) return -1;
    return (p < q ? -1 : 1) * (wanted.down ? -1 : 1);
  };
  return wanted.by || wanted.down ? matching.sort(order) : matching;
}

function virtualTable(run) {
  const sight = h("div", { class: "sight", role: "rowgroup" });  // one layer that moves, not one per row
  const body = h("div", { class: "rows", role: "presentation" }, sight);
  const heads = FIELDS.map(([name], i) => h("span", { role: "columnheader" }, h("button", { type: "button", onclick: () => sort(i) }, name)));
  const head = h("div", { class: "row head", role: "row" }, heads);
  const box = h("div", { class: "virtual", role: "table", tabindex: 0, "aria-label": "Rollouts; arrow keys move, Enter opens" }, h("div", { role: "rowgroup", class: "top" }, head), body);
  const pool = [];
  const table = { box, show, sorted: null };
  let rows = [], chosen = 0, asked = 0;

  function sort(i) {
    Object.assign(wanted, { down: wanted.by === i ? !wanted.down : false, by: i });
    table.sorted();
  }
  function show(matching) {
    rows = matching;
    chosen = Math.min(chosen, Math.max(rows.length - 1, 0));
    body.style.height = `${rows.length * ROW}px`;
    box.setAttribute("aria-rowcount", rows.length + 1);
    heads.forEach((cell, i) => cell.setAttribute("aria-sort", wanted.by !== i ? "none" : wanted.down ? "descending" : "ascending"));
    paint();
  }
  function paint() {
    asked = 0;
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 4);
    const n = Math.min(rows.length - first, Math.ceil((box.clientHeight || 600) / ROW) + 8);
    while (pool.length < n) {
      const texts = FIELDS.map(() => document.createTextNode(""));
      const open = h("a", {}, texts[2]);
      const row = h("div", { class: "row", role: "row" }, texts.map((text, i) => h("span", { role: "cell" }, i === 2 ? open : text)));
      pool.push({ row, texts, open });
      sight.append(row);
    }
    sight.style.transform = `translateY(${first * ROW}px)`;
    pool.forEach(({ row, texts, open }, i) => {
      row.hidden = i >= n;
      if (i >= n) return;
      const member = rows[first + i];
      row.setAttribute("aria-rowindex", first + i + 2);
      row.className = `row ${member.outcome}${first + i === chosen ? " chosen" : ""}${run.isKept(member.id) ? " kept" : ""}`;
      open.setAttribute("href", "#" + placeOf(run, member.id));
      FIELDS.forEach(([, of], k) => {
        const value = of(member);
        const text = typeof value === "number" && k ? num(value) : String(value ?? "–");
        if (texts[k].data !== text) texts[k].data = text; // avoids a layout of equal texts
      });
    });
  }
  box.addEventListener("scroll", () => (asked ||= requestAnimationFrame(paint)), { passive: true });
  box.addEventListener("keydown", (event) => {
    const page = Math.floor(box.clientHeight / ROW) - 2;
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length }[event.key];
    if (event.target !== box || (!move && event.key !== "Enter")) return;
    event.preventDefault();
    if (!move) return rows[chosen] && (location.hash = "#" + placeOf(run, rows[chosen].id));
    chosen = Math.max(0, Math.min(rows.length - 1, chosen + move));
    const top = chosen * ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + 3 * ROW > box.scrollTop + box.clientHeight) box.scrollTop = top + 3 * ROW - box.clientHeight;
    paint();
  });
  return table;
}
