// What happened to the recording itself: warnings, events on a time line, ledger, patches; and how the job was set up.
function timeLine(events) {
  const dated = events.filter((event) => Number.isFinite(event.step));
  if (!dated.length) return null;
  const width = 1240, steps = DATA.run.steps, low = Math.min(...dated.map((e) => e.step), ...steps), high = Math.max(...dated.map((e) => e.step), ...steps);
  const x = (step) => (low === high ? width / 2 : 30 + ((step - low) / (high - low)) * (width - 60)), heights = new Map();
  const svg = s("svg", { viewBox: `0 0 ${width} 92`, role: "img", "aria-label": "events by step" }, s("line", { class: "axis", x1: 30, x2: width - 30, y1: 66, y2: 66 }));
  for (const step of steps) svg.append(s("line", { class: "grid", x1: x(step), x2: x(step), y1: 62, y2: 70 }));
  for (const v of ticks(low, high, 10).filter(Number.isInteger)) svg.append(s("text", { x: x(v), y: 86, "text-anchor": "middle" }, v));
  for (const event of dated) {
    const level = heights.get(event.step) || 0; heights.set(event.step, level + 1);
    if (level < 5) svg.append(s("circle", { cx: x(event.step), cy: 56 - level * 11, r: 5, css: { fill: event.event === "fault" || event.event === "alert" ? "var(--bad)" : "var(--note)" } }, s("title", null, `step ${event.step}, rank ${event.rank}: ${event.text || event.event}`)));
  }
  return h("div", { class: "plot" }, svg);
}
function plain(value) { return value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value); }
function pairs(object) { return Object.entries(object || {}).map(([name, value]) => h("tr", { "data-row": name.toLowerCase() }, h("td", { class: "key" }, name), h("td", { class: "mono pre" }, plain(value)))); }

function logTab() {
  const log = DATA.log;
  const events = log.events.map((event) => h("tr", null, h("td", { class: "n" }, plain(event.step)), h("td", { class: "n" }, plain(event.rank)), h("td", null, event.event), h("td", { class: "pre" }, event.text)));
  const groups = log.ledgers.groups.map((group) => [h("h3", { css: { margin: "10px 0 2px" } }, `ranks ${span(group.ranks)}`), table([{ title: "what" }, { title: "" }], pairs(group.ledger))]);
  const patches = log.ledgers.patches.map((patch) => h("tr", null, h("td", { class: "mono" }, patch.id), h("td", null, h("span", { class: `badge ${patch.state === "bound" ? "good" : "note"}` }, patch.state)), h("td", { class: "n" }, patch.fired), h("td", null, patch.why || patch.reason)));
  const verdicts = log.verdicts.map((row) => h("tr", null, h("td", { class: "n" }, row.step), h("td", { class: "n" }, row.rank), h("td", null, row.kind), h("td", { class: "key" }, row.name), h("td", null, row.op), h("td", { class: "mono pre" }, plain(row.extra))));
  return h("div", { class: "stack" },
    card("Warnings", log.warnings.length ? null : "Everything that was asked was recorded.", log.warnings.length ? h("ul", null, log.warnings.map((text) => h("li", null, text))) : null),
    card("Events", log.events.length ? "alerts, faults and drops of all ranks" : "No alert, no fault, no drop.", timeLine(log.events), events.length ? h("div", { class: "long" }, table([{ title: "step", number: true }, { title: "rank", number: true }, { title: "event" }, { title: "text" }], events)) : null),
    verdicts.length ? card("Perturbed operators and checks", null, h("div", { class: "long" }, table([{ title: "step", number: true }, { title: "rank", number: true }, { title: "kind" }, { title: "name" }, { title: "operator" }, { title: "verdict" }], verdicts))) : null,
    card("Ledger", "what was asked, bound, seen and written; ranks that are alike together", groups),
    card("Patches", null, h("div", { class: "long" }, table([{ title: "patch" }, { title: "state" }, { title: "fired", number: true }, { title: "why" }], patches))));
}
function setupTab() {
  const body = pairs(DATA.run.arguments), input = h("input", { type: "search", placeholder: "Search arguments", "aria-label": "search arguments", oninput: (event) => {
    const text = event.target.value.trim().toLowerCase();
    body.forEach((row) => { row.style.display = row.getAttribute("data-row").includes(text) ? "" : "none"; });
  } });
  const probe = DATA.run.probe || {};
  return h("div", { class: "columns" }, card("Training arguments", `${body.length} of them`, input, h("div", { class: "long" }, table([{ title: "argument" }, { title: "value" }], body))),
    h("div", { class: "stack", css: { "align-content": "start" } }, card("Environment", null, table([{ title: "what" }, { title: "version" }], pairs(DATA.run.versions))),
      card("Layout", null, table([{ title: "axis" }, { title: "size" }], pairs(DATA.run.sizes))),
      card("Probe file", probe.file || null, h("pre", { class: "mono pre", css: { margin: "0" } }, JSON.stringify(probe.content || {}, null, 2))),
      (DATA.run.unseen || []).length ? card("Not seen", "what the kit cannot look into in this job", h("ul", null, DATA.run.unseen.map((text) => h("li", null, plain(text))))) : null));
}
