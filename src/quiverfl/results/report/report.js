// Makes a report answer: experiments switched on and off, sorted tables, clients of other seeds and
// stages, light and dark. Without it the page is whole, and still. It uses what charts.js defines.

// Legends become switches: a click for one experiment, a double click for it alone.
const switches = [];
const toggle = (label, only) => {
  const labels = [...new Set(switches.map((s) => s.dataset.label))];
  if (only) labels.forEach((other) => (other === label ? hidden.delete(other) : hidden.add(other)));
  else if (!hidden.delete(label)) hidden.add(label);
  if (labels.every((other) => hidden.has(other))) hidden.clear(); // nothing left is of no use
  switches.forEach((s) => s.setAttribute("aria-pressed", String(!hidden.has(s.dataset.label))));
  redraw();
};
all(document, ".legend").forEach((legend) => {
  all(legend, "li").forEach((item) => {
    const button = el("button", { type: "button", "aria-pressed": "true", "data-label": item.dataset.label, title: "Click: on or off. Double click: this one alone." }, ...item.childNodes);
    button.onclick = () => toggle(item.dataset.label, false);
    button.ondblclick = () => toggle(item.dataset.label, true);
    switches.push(button);
    item.replaceChildren(button);
  });
});

// A table is sorted by the column whose title is clicked; again, and it is turned round.
const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, s: 1, min: 60, h: 3600 };
const valueOf = (cell) => {
  const text = cell.textContent.trim().replace(/−/g, "-").replace(/(\d),(?=\d{3})/g, "$1");
  const found = /([+-]?\d+(?:\.\d+)?)\s*(kB|MB|GB|TB|B|s|min|h)?\b/.exec(text);
  if (text.includes("∞")) return Infinity;
  return found ? Number(found[1]) * (UNITS[found[2]] || 1) : null;
};
const sortable = (table) => {
  const titles = all(table, "thead tr:last-child th");
  const sort = (title) => {
    const place = titles.indexOf(title);
    const numeric = title.classList.contains("number");
    const before = title.getAttribute("aria-sort"); // numbers begin with the highest, words with A
    const up = numeric ? before === "descending" : before !== "ascending";
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => {
      const cell = row.cells[place];
      return [row, numeric ? valueOf(cell) : cell.textContent];
    });
    rows.sort(([, a], [, b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // nothing comes last
      const order = numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
      return up ? order : -order;
    });
    titles.forEach((other) => other.setAttribute("aria-sort", "none"));
    title.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows.map(([row]) => row));
  };
  titles.forEach((title) => {
    title.classList.add("sorts");
    title.tabIndex = 0;
    title.onclick = () => sort(title);
    title.onkeydown = (event) => { if (event.key === "Enter") sort(title); };
  });
};

// Client by client: the table again, for the chosen seed and stage.
const people = (holder) => {
  const content = JSON.parse(holder.querySelector("script").textContent);
  const place = holder.querySelector(".wide");
  const select = (name, options) => {
    const made = el("select", { name }, ...options.map((text, i) => el("option", { value: i }, text)));
    made.onchange = () => show();
    return el("label", {}, `${name} `, made);
  };
  const controls = el("div", { class: "controls" }, select("data of", content.views.map((v) => v.name)), select("stage", content.stages));
  const more = controls.appendChild(el("button", { type: "button", class: "more" }));
  let everybody = false;
  more.onclick = () => { everybody = !everybody; show(); };
  const bars = (counts, highest) => {
    const wide = 6 * counts.length;
    const cell = el("td", {});
    const svg = draw(cell, "svg", { class: "labels", viewBox: `0 0 ${wide} 19`, width: Math.min(wide, 240), height: 19, preserveAspectRatio: "none", role: "img" });
    draw(svg, "title", {}, counts.map((n, k) => [n, k]).filter(([n]) => n).map(([n, k]) => `class ${k}: ${n}`).join(", "));
    counts.forEach((n, k) => {
      const tall = Math.max(2, Math.round((18 * n) / highest));
      if (n) draw(svg, "rect", { x: 6 * k, y: 18 - tall, width: 5, height: tall });
    });
    draw(svg, "rect", { x: 0, y: 18, width: wide - 1, height: 1, class: "ground" });
    return cell;
  };
  const number = (value) => el("td", { class: "number" }, value === undefined || value === null ? "–" : value);
  const score = (v) => (v === null ? "–" : content.kind === "share" ? (100 * v).toFixed(2) : v.toFixed(4));
  const show = () => {
    const [at, stage] = all(controls, "select").map((s) => Number(s.value));
    const view = content.views[at];
    const judge = view.experiments.find((one) => one.judge).scores[content.stages[stage]];
    const sign = content.higher ? 1 : -1;
    const order = view.clients.map((_, i) => i).sort((a, b) =>
      judge[a] === null || judge[b] === null ? (judge[a] === null) - (judge[b] === null) : sign * (judge[a] - judge[b]));
    const labelled = view.clients.some((client) => client.counts);
    const titles = ["client", "training", "test", ...(labelled ? ["classes", "labels"] : [])];
    const head = el("tr", {}, ...titles.map((t) => el("th", { scope: "col", class: t === "client" || t === "labels" ? "" : "number" }, t)),
      ...view.experiments.map((one) => el("th", { scope: "col", class: "number" }, el("span", { class: "key", style: `color:${one.color}` }, one.glyph + "\ufe0e"), one.label)));
    const rows = order.slice(0, everybody ? order.length : content.atFirst).map((i) => {
      const client = view.clients[i];
      const counts = client.counts || [];
      return el("tr", {}, el("th", { scope: "row" }, client.name), number(client.train?.toLocaleString("en")), number(client.test?.toLocaleString("en")),
        ...(labelled ? [number(counts.filter((n) => n).length), bars(counts, view.highest)] : []),
        ...view.experiments.map((one) => number(score(one.scores[content.stages[stage]][i]))));
    });
    const table = el("table", { class: "people" }, el("thead", {}, head), el("tbody", {}, ...rows));
    place.replaceChildren(table);
    sortable(table);
    more.hidden = order.length <= content.atFirst;
    more.textContent = everybody ? `Only the ${content.atFirst} worst off` : `All ${order.length} clients`;
  };
  holder.prepend(controls);
  show();
};

// Light and dark: as the system has it, until somebody chooses.
const root = document.documentElement;
const kept = { get: () => { try { return localStorage.getItem("quiver-theme"); } catch { return null; } },
  set: (theme) => { try { localStorage.setItem("quiver-theme", theme); } catch { /* it lasts as long as the page */ } } };
const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
const theme = el("button", { type: "button", class: "theme" });
const named = () => { theme.textContent = dark() ? "Light" : "Dark"; };
theme.onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; kept.set(root.dataset.theme); named(); };
if (kept.get()) root.dataset.theme = kept.get();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", named);
named();
document.querySelector("header")?.append(theme);

root.classList.add("lively");
all(document, "figure > script").forEach((script) => charts.push(new Chart(script.parentElement, JSON.parse(script.textContent))));
all(document, "table:not(.settings):not(.people)").forEach(sortable);
all(document, ".clients").forEach(people);
redraw();
let width = root.clientWidth;
addEventListener("resize", () => { if (root.clientWidth !== width) { width = root.clientWidth; redraw(); } });
