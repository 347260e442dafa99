// What was found while the job ran: suspect operators, alerts on a time line, ranks that were compared.
const VERDICT_WORDS = { ok: "in order", nan: "makes NaN", inf: "makes Inf", wrong: "wrong", odd: "odd one out", nondeterministic: "not repeatable", sign: "signs flip", changed: "changed", fragile: "fragile" };

function timeLine(events) {
  const dated = events.filter((event) => Number.isFinite(event.step));
  if (!dated.length) return null;
  const width = 1240, steps = DATA.run.steps, low = Math.min(...dated.map((e) => e.step), ...steps), high = Math.max(...dated.map((e) => e.step), ...steps);
  const x = (step) => (low === high ? width / 2 : 30 + ((step - low) / (high - low)) * (width - 60)), heights = new Map();
  const svg = s("svg", { viewBox: `0 0 ${width} 92`, role: "img", "aria-label": "alerts by step" }, s("line", { class: "axis", x1: 30, x2: width - 30, y1: 66, y2: 66 }));
  for (const step of steps) svg.append(s("line", { class: "grid", x1: x(step), x2: x(step), y1: 62, y2: 70 }));
  const told = [...new Set(dated.map((event) => event.step))];
  for (const v of told.length <= 12 ? new Set([low, ...told, high]) : ticks(low, high, 10).filter(Number.isInteger)) svg.append(s("text", { x: x(v), y: 86, "text-anchor": "middle" }, v));
  for (const event of dated) {
    const level = heights.get(event.step) || 0; heights.set(event.step, level + 1);
    if (level < 4) svg.append(s("circle", { cx: x(event.step), cy: 56 - level * 11, r: 5, class: event.key && BY_KEY.has(event.key) ? "pick" : null, onclick: () => showTensor(event.key, event.step), css: { fill: event.bad ? "var(--bad)" : "var(--note)" } }, s("title", null, `step ${event.step}: ${event.text}`)));
  }
  for (const [step, count] of heights) if (count > 4) svg.append(s("text", { x: x(step), y: 12, "text-anchor": "middle" }, `+${count - 4}`));
  return h("div", { class: "plot" }, svg);
}

function alertsCard() {
  const other = DATA.log.events.filter((event) => !["alert", "check", "nonfinite", "perturb"].includes(event.event)).map((event) => ({ ...event, text: event.text || event.event, bad: event.event === "fault" }));
  const line = timeLine([...DATA.alerts.map((alert) => ({ ...alert, bad: true })), ...other]);
  const rows = DATA.alerts.map((alert) => h("tr", { class: BY_KEY.has(alert.key) ? "pick" : null, onclick: () => showTensor(alert.key, alert.step) },
    h("td", { class: "n" }, alert.step), h("td", null, span(alert.ranks)), h("td", null, h("span", { class: "badge bad" }, alert.rule)), h("td", { class: "key" }, alert.name), h("td", { class: "pre" }, alert.text)));
  return card("Alerts", rows.length ? `${plural(rows.length, "alert")}, causes first; red on the line: alerts and faults, yellow: other events` : "No rule and no check has raised an alert.", line,
    rows.length ? h("div", { class: "long" }, table([{ title: "step", number: true }, { title: "ranks" }, { title: "rule" }, { title: "name" }, { title: "finding" }], rows, { id: "alerts" })) : null);
}

function suspectsOf(perturb) {
  const counts = Object.entries(perturb.verdicts).sort((a, b) => b[1] - a[1]).map(([verdict, count]) => `${count.toLocaleString("en")} ${VERDICT_WORDS[verdict] || verdict}`).join(", ");
  const rows = perturb.suspects.map((suspect) => h("tr", null, h("td", null, h("span", { class: "badge bad" }, VERDICT_WORDS[suspect.verdict] || suspect.verdict)), h("td", { class: "key" }, suspect.name),
    h("td", null, suspect.layers.length ? span(suspect.layers) : "–"), h("td", null, span(suspect.steps)), h("td", null, span(suspect.ranks)), h("td", { class: "n" }, `${suspect.times} of ${suspect.looks}`),
    h("td", null, h("div", null, suspect.text), h("div", { class: "muted" }, `${suspect.sure}; next: ${suspect.next}`))));
  return card("Suspect operators", `${plural(perturb.operators, "operator")} checked in steps ${span(perturb.steps)}: ${counts}`, rows.length
    ? h("div", { class: "long" }, table([{ title: "verdict" }, { title: "operator" }, { title: "layers" }, { title: "steps" }, { title: "ranks" }, { title: "found", number: true }, { title: "finding and next step" }], rows, { id: "perturb" }))
    : h("p", null, h("span", { class: "badge good" }, "none"), " Every checked operator is within the limits of its class."));
}

function checksCard() {
  if (!DATA.checks.length) return null;
  const disagree = DATA.alerts.filter((alert) => alert.rule === "replica").length;
  const rows = DATA.checks.map((entry) => h("tr", null, h("td", { class: "key" }, entry.group), h("td", null, span(entry.ranks)), h("td", { class: "n" }, entry.times), h("td", null, entry.notes.join("; "))));
  return card("Ranks compared while training", disagree ? "digests of weights, gradients and RNG states differ, see the alerts" : "digests of weights, gradients and RNG states were identical in all comparisons",
    h("div", { class: "long" }, table([{ title: "group" }, { title: "ranks" }, { title: "comparisons", number: true }, { title: "" }], rows, { id: "checks" })));
}
function findingsTab() {
  return h("div", { class: "stack" }, DATA.perturb ? suspectsOf(DATA.perturb) : null, alertsCard(), checksCard(),
    DATA.perturb ? null : card("Suspect operators", "No operator was checked. Add a perturb section to the probe file to check operators without a second run."));
}
