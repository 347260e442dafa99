// Beside a golden run: what agrees, the path to the first divergence, the suspects, the arguments that differ.
const STATE_ORDER = ["agree", "diverged", "inherited", "only_left", "only_right", "layout"];

function versusTab() {
  const c = VERSUS.comparison, total = Object.values(c.counts).reduce((a, b) => a + b, 0) || 1;
  const shares = h("div", { class: "share" }, STATE_ORDER.filter((state) => c.counts[state]).map((state) => h("i", { class: `v-${state}`, css: { flex: String(Math.max(c.counts[state], total * 0.006)) }, title: `${STATE_WORDS[state]}: ${c.counts[state]}` })));
  const words = h("div", { class: "legend" }, STATE_ORDER.filter((state) => c.counts[state]).map((state) => h("span", null, h("i", { class: `v-${state}` }), `${c.counts[state].toLocaleString("en")} ${STATE_WORDS[state]}`)));
  const sides = h("p", { class: "muted" }, `golden: ${c.golden} (${layoutWords(VERSUS.run.sizes)}) · this run: ${c.run} (${layoutWords(DATA.run.sizes)}) · steps ${span(c.steps)}`);
  return h("div", { class: "stack" },
    card({ agree: "The runs agree", diverged: "The runs diverged", incomparable: "The runs cannot be compared" }[c.verdict], c.reason, sides, c.reason ? null : h("p", null, `${total.toLocaleString("en")} tensors, shards and microbatches put together`), shares, words,
      c.hints.map((text) => h("p", null, h("span", { class: "badge note" }, "hint"), " ", text))),
    flowCard(), suspectsCard(c), argumentsCard());
}
function flowCard() {
  if (!VERSUS.flow.length) return null;
  const first = VERSUS.comparison.first_divergence;
  const stops = VERSUS.flow.map((entry) => h("div", { class: `stop${entry.first ? " first" : ""}`, onclick: () => showTensor(entry.key, entry.step) },
    h("div", { class: "dot" }, h("i", { class: `v-${entry.state}` })),
    h("div", null, h("span", { class: "key" }, entry.name), " ", h("span", { class: "what" }, `${labelOf(entry)} · ${entry.op}${stageOf(entry.name)}`), (entry.carried || []).map((text) => h("div", { class: "muted carried" }, `carried by ${text}`))),
    h("div", { class: "pair mono" }, `${num(entry.golden.norm, 6)} | ${num(entry.run.norm, 6)}${entry.run.bad ? ` (${entry.run.bad} non-finite)` : ""}`),
    h("div", { class: "pair" }, h("span", { class: `badge ${{ agree: "good", diverged: "bad", inherited: "note" }[entry.state] || ""}` }, entry.first ? "first divergence" : STATE_WORDS[entry.state]))));
  return card("How it came about", `step ${first.step}${first.microbatch === null ? "" : `, microbatch ${first.microbatch}`}: in order of cause, norms of golden | this run; error ${first.error === null ? "infinite" : num(first.error, 3)}, rounding explains ${num(first.tolerance, 3)}; ranks ${span(first.ranks)}`,
    h("div", { class: "flow", id: "flow" }, stops), first.site && first.site.stack.length ? [h("h3", { css: { margin: "12px 0 0" } }, "Called from"), h("ol", { class: "frames mono" }, first.site.stack.slice(0, 5).map((frame) => h("li", { title: frame }, frame.split("site-packages/").pop().split("/").slice(-4).join("/"))))] : null);
}
function stageOf(name) {
  const found = DATA.stages.filter((stage) => stage.names.includes(name));
  return found.length && DATA.stages.length > 1 ? ` · stage ${found.map((stage) => stage.pp).join(", ")}, ranks ${span(found.flatMap((stage) => stage.ranks))}` : "";
}
function suspectsCard(c) {
  if (!c.suspects.length) return null;
  const rows = c.suspects.map((d) => { const key = keyOf(d); return h("tr", { class: "pick", onclick: () => showTensor(key, d.step) },
    h("td", null, h("span", { class: "key" }, d.name), " ", h("span", { class: "muted" }, labelOf(d))), h("td", { class: "n" }, d.step), h("td", { class: "n" }, d.microbatch === null ? "–" : d.microbatch), h("td", null, span(d.ranks)),
    h("td", { class: "n" }, d.error === null ? "infinite" : num(d.error, 3)), h("td", { class: "n" }, num(d.tolerance, 3)), h("td", null, h("span", { class: `badge ${d.state === "diverged" ? "bad" : "note"}` }, STATE_WORDS[d.state] || d.state)), h("td", null, d.what)); });
  return card("Next suspects", null, table([{ title: "tensor" }, { title: "step", number: true }, { title: "microbatch", number: true }, { title: "ranks" }, { title: "error", number: true }, { title: "allowed", number: true }, { title: "state" }, { title: "what" }], rows, { id: "suspects" }));
}
function argumentsCard() {
  if (!VERSUS.arguments.length) return card("Arguments", "Both runs were started with the same arguments and versions.");
  const text = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const tone = { numbers: "bad", versions: "note" };
  return card("Arguments that differ", "those that change numbers first", table([{ title: "argument" }, { title: "golden" }, { title: "this run" }, { title: "effect" }],
    VERSUS.arguments.map((entry) => h("tr", null, h("td", { class: "key" }, entry.name), h("td", { class: "mono" }, text(entry.golden)), h("td", { class: "mono" }, text(entry.run)), h("td", null, h("span", { class: `badge ${tone[entry.group] || ""}` }, entry.group)))), { id: "argument-differences" }));
}
