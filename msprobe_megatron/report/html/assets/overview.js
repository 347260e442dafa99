// First tab: the verdict in words, the next command, and the two or three pictures that show it.
const SIGNS = { good: "✓", bad: "!", note: "i" };

function verdictCard() {
  const verdict = DATA.verdict;
  return h("div", { class: `card verdict ${verdict.tone}`, id: "verdict" },
    h("div", { class: "sign", "aria-hidden": "true" }, SIGNS[verdict.tone]), h("h1", null, verdict.headline),
    h("div", { class: "findings" }, verdict.findings.map((finding) => h("div", { class: `finding ${finding.tone}` },
      h("div", { class: "title" }, finding.title), h("div", { class: "text" }, finding.text),
      finding.facts.length ? h("dl", { class: "told" }, finding.facts.map(([label, value]) => [h("dt", null, label), h("dd", null, value)])) : null,
      finding.command || finding.key ? h("div", { class: "next" },
        finding.command ? [h("span", { class: "label" }, "next:"), h("code", { class: "command" }, finding.command), copyButton(finding.command)] : null,
        finding.key && BY_KEY.has(finding.key) ? h("button", { class: "link", type: "button", onclick: () => showTensor(finding.key, finding.step) }, "show this tensor") : null) : null,
      finding.then ? h("div", { class: "then" }, h("span", { class: "label" }, "then: "), finding.then) : null))));
}

function layoutWords(sizes) {
  const used = Object.entries(sizes || {}).filter(([axis, size]) => size > 1 && !["etp", "edp"].includes(axis));
  return used.map(([axis, size]) => `${axis.toUpperCase()}${size}`).join(" × ") || "one rank";
}

function factsCard() {
  const run = DATA.run, a = run.arguments || {}, versions = run.versions || {};
  const items = [
    ["layout", `${layoutWords(run.sizes)} (${plural(run.world || 1, "rank")})`],
    ["steps recorded", run.steps.length ? `${run.steps.length} (${span(run.steps)})` : DATA.perturb ? `none; examined ${span(DATA.perturb.steps)}` : "none"],
    a.num_layers ? ["model", `${a.num_layers} layers × ${a.hidden_size}`] : null,
    a.global_batch_size ? ["batch", `${a.global_batch_size} in microbatches of ${a.micro_batch_size}`] : null,
    ["megatron-core", versions["megatron-core"] || "–"], ["torch", versions.torch || "–"], ["started", (run.started || "–").replace("T", " ").replace("Z", " UTC")],
    VERSUS ? ["beside", `${VERSUS.run.path}: ${layoutWords(VERSUS.run.sizes)}`] : null,
  ];
  return h("div", { class: "card" }, h("dl", { class: "facts", css: { margin: "0" } },
    items.filter(Boolean).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))));
}

function lossCharts() {
  const names = Object.keys(DATA.losses.losses), charts = [];
  const pair = (title, get, label) => {
    const lines = [{ label: VERSUS ? "this run" : title, steps: DATA.losses.steps, values: get(DATA.losses), color: "var(--run)", bad: get(DATA.losses).map((v) => (v === null ? 1 : 0)) }];
    if (VERSUS && VERSUS.losses && get(VERSUS.losses)) lines.push({ label: "golden run", steps: VERSUS.losses.steps, values: get(VERSUS.losses), color: "var(--golden)", dash: true });
    return card(title, label, VERSUS ? lineLegend(lines) : null, lineChart(lines, { label: title, height: 190 }));
  };
  for (const name of names.slice(0, 2)) charts.push(pair(name, (l) => l.losses[name] || [], "mean over the tokens of each step"));
  if (DATA.losses.gradient_norm) charts.push(pair("gradient norm", (l) => l.gradient_norm || [], "all reduced gradients, before clipping"));
  return charts.length ? h("div", { class: "columns" }, charts) : null;
}

function differenceCard() {
  const map = VERSUS.map, kinds = heatKinds(map), words = { yes: "error above that expected from rounding", no: "no error above that expected from rounding", each: "tensors differ", unit: "(expected from rounding)",
    // Colours end where rounding ends: two right runs stay pale.
    scale: { low: 0.001, high: 1, log: true, of: (v) => (v <= 0.001 ? 0 : Math.min(1, 1 + Math.log10(v) / 3)) } };
  const first = VERSUS.comparison.first_divergence, place = h("div");
  const draw = (kind) => place.replaceChildren(heatMap(map, VERSUS.comparison.steps, kind, "excess", "layer", showPlace, words));
  const kind = first && map.kinds[first.kind] ? first.kind : (kinds[0] || [""])[0];
  draw(kind);
  return card("Where the runs differ", "largest error of each layer and step, relative to the error expected from rounding", h("div", { class: "controls" }, select("of", kinds, kind, draw)), place);
}
function overviewTab() {
  const bad = DATA.verdict.headline.startsWith("Non-finite");
  const kind = DATA.heat.layers.kinds.gradient && !bad ? "gradient" : "activation";
  if (!TENSORS.length) return h("div", { class: "stack" }, verdictCard(), factsCard(), [...findingsTab().childNodes]);
  const map = VERSUS && VERSUS.map ? differenceCard() : !Object.keys(DATA.heat.layers.kinds).length ? null : heatCard("Layers by step", "click a cell to see the layer's tensors of that step", DATA.heat.layers, "layer", showPlace, { kind });
  // What shows the trouble comes first.
  const pictures = DATA.verdict.tone === "bad" ? [map, lossCharts()] : [lossCharts(), map];
  return h("div", { class: "stack" }, verdictCard(), factsCard(), pictures);
}
