// Trends of any names by step, several in one picture, and the heat maps.
const trend = { keys: [], statistic: "norm", log: true };
const TREND_MOST = 6;
let trendPlace;

function addTrend(key) {
  if (!BY_KEY.has(key) || trend.keys.includes(key)) return;
  trend.keys = [...trend.keys, key].slice(-TREND_MOST);
  drawTrend();
}
const trendLabel = (t) => `${t.name} · ${labelOf(t)}`;
const TREND_NAMES = new Map(TENSORS.map((t) => [trendLabel(t), keyOf(t)]));

function drawTrend() {
  const get = STATISTICS[trend.statistic][1];
  const lines = trend.keys.flatMap((key, n) => {
    const t = BY_KEY.get(key), color = `var(--s${n + 1})`, golden = GOLDEN.get(key);
    const own = { label: trendLabel(t), steps: STEPS, values: STEPS.map((_, i) => get(t, i)), color, bad: t.bad };
    return golden ? [own, { label: `${trendLabel(t)} (golden)`, steps: VERSUS.series.steps, values: VERSUS.series.steps.map((_, i) => get(golden, i)), color, dash: true }] : [own];
  });
  const chips = trend.keys.map((key, n) => h("button", { class: "chip", type: "button", title: "remove", onclick: () => { trend.keys = trend.keys.filter((other) => other !== key); drawTrend(); } },
    h("i", { css: { background: `var(--s${n + 1})` } }), trendLabel(BY_KEY.get(key)), " ×"));
  trendPlace.replaceChildren(h("div", { class: "chips" }, chips), lines.length ? lineChart(lines, { width: 1240, height: 300, log: trend.log, label: "trends" }) : h("p", { class: "muted" }, "Choose a tensor above."));
}

function whenTab() {
  const names = [...TREND_NAMES.keys()];
  const input = h("input", { type: "search", id: "trend-name", list: "trend-names", placeholder: "Add a tensor: type part of its name", "aria-label": "add a tensor", css: { width: "min(620px, 100%)" },
    onchange: (event) => {
      const text = event.target.value.trim(), hit = TREND_NAMES.get(text) || TREND_NAMES.get(names.find((name) => text && name.toLowerCase().includes(text.toLowerCase())));
      if (hit) { addTrend(hit); event.target.value = ""; }
    } });
  trendPlace = h("div", { id: "trends" });
  const finding = DATA.verdict.findings.find((entry) => BY_KEY.has(entry.key));
  const ends = TENSORS.filter((t) => t.kind === "activation" && t.io === "output" && t.path === "" && /layers\.\d+$/.test(t.name));
  trend.keys = finding ? [finding.key] : ends.length ? [...new Set([0, Math.floor(ends.length / 2), ends.length - 1])].map((i) => keyOf(ends[i])) : TENSORS.slice(0, 1).map(keyOf);
  drawTrend();
  return h("div", { class: "stack" },
    card("Trends", "up to six tensors; red bands are steps with non-finite values", h("div", { class: "controls" }, input, h("datalist", { id: "trend-names" }, names.slice(0, 3000).map((name) => h("option", { value: name }))),
      select("show", Object.entries(STATISTICS).map(([key, [words]]) => [key, words]), trend.statistic, (value) => { trend.statistic = value; drawTrend(); }),
      select("scale", [["log", "logarithmic"], ["linear", "linear"]], "log", (value) => { trend.log = value === "log"; drawTrend(); })), trendPlace),
    heatCard("Layers by step", "shards merged; click for the layer's tensors", DATA.heat.layers, "layer", showPlace),
    heatCard("Ranks by step", "values of each rank, shards not merged", DATA.heat.ranks, "rank", null));
}
