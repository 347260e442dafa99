// Beside a golden run: what agrees, the path to the first divergence, the suspects, the settings that differ.
const STATE_ORDER = ["agree", "diverged", "inherited", "only_left", "only_right", "layout"];

function versusTab() {
  const c = VERSUS.comparison, total = Object.values(c.counts).reduce((a, b) => a + b, 0) || 1;
  const shares = h("div", { class: "share" }, STATE_ORDER.filter((state) => c.counts[state]).map((state) => h("i", { class: `v-${state}`, css: { flex: String(Math.max(c.counts[state], total * 0.006)) }, title: `${STATE_WORDS[state]}: ${c.counts[state]}` })));
  const words = h("div", { class: "legend" }, STATE_ORDER.filter((state) => c.counts[state]).map((state) => h("span", null, h("i", { class: `v-${state}` }), `${c.counts[state].toLocaleString("en")} ${STATE_WORDS[state]}`)));
  const sides = h("p", { class: "muted" }, `golden: ${c.golden} (${layoutWords(VERSUS.run.sizes)}) · this run: ${c.run} (${layoutWords(DATA.run.sizes)}) · steps ${span(c.steps)}`);
  return h("div", { class: "stack" },
    card({ agree: "The runs agree", diverged: "The runs diverged", incomparable: "The runs cannot be compared" }[c.verdict], c.reason, sides, c.reason ? null : h("p", null, `${total.toLocaleString("en")} tensors, shards and microbatches merged`), shares, words,
      c.hints.map((text) => h("p", null, h("span", { class: "badge note" }, "hint"), " ", text))),
    flowCard(), suspectsCard(c), setupCard());
}
function flowCard() {
  if (!VERSUS.flow.length) return null;
  const first = VERSUS.comparison.first_divergence;
  const stops = VERSUS.flow.map((entry, n) => {
    // A module that is named by the stop before is not named again.
    const again = n > 0 && VERSUS.flow[n - 1].name === entry.name;
    return h("div", { class: `stop${entry.first ? " first" : ""}`, onclick: () => showTensor(entry.key, entry.step) }, h("div", { class: "dot" }, h("i", { class: `v-${entry.state}` })),
      h("div", null, again ? null : h("div", null, h("span", { class: "key" }, entry.name), " ", h("span", { class: "what" }, `${entry.op}${stageOf(entry.name)}`)), h("div", null, labelOf(entry), heldBy(entry)),
        entry.carried.map((text) => h("div", { class: `carried ${/: |^no /.test(text) ? "bad-text" : "muted"}` }, text))),
      h("div", { class: "pair mono" }, num(entry.golden.norm, 6)), h("div", { class: "pair mono" }, `${num(entry.run.norm, 6)}${entry.run.bad ? ` (${entry.run.bad} non-finite)` : ""}`),
      h("div", { class: "pair" }, h("span", { class: `badge ${{ agree: "good", diverged: "bad", inherited: "note" }[entry.state] || ""}` }, entry.first ? "first divergence" : STATE_WORDS[entry.state])));
  });
  const head = h("div", { class: "flow-head" }, h("div"), h("div", null, "tensor, and the norm that each rank holds"), h("div", { class: "pair" }, "golden"), h("div", { class: "pair" }, "this run"), h("div"));
  return card("Path to the first divergence", `step ${first.step}${first.microbatch === null ? "" : `, microbatch ${first.microbatch}`}, in causal order; relative error ${first.error === null ? "infinite" : num(first.error, 3)}, expected from rounding ${num(first.tolerance, 3)}; ranks ${span(first.ranks)}`,
    h("div", { class: "flow", id: "flow" }, head, stops), VERSUS.way.communication || (DATA.run.world || 1) === 1 ? null : h("p", { class: "muted" }, "Communication was not recorded; with dump: {level: mix} this list names the communication between ranks."),
    first.site && first.site.stack.length ? [h("h3", { css: { margin: "12px 0 0" } }, "Called from"), h("ol", { class: "frames mono" }, first.site.stack.slice(0, 5).map((frame) => h("li", { title: frame }, frame.split("site-packages/").pop().split("/").slice(-4).join("/"))))] : null);
}
function heldBy(entry) {
  if (entry.ranks.length < 2) return null;
  const shard = entry.ranks[0][2];
  return h("span", { class: "what mono held" }, `${entry.ranks.map(([rank, norm, , bad]) => `rank ${rank}: ${num(norm, 5)}${bad ? ` (${bad} non-finite)` : ""}`).join(" · ")}${shard && !shard.startsWith("?") ? `  [${shard}]` : ""}`);
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
  return card("Next suspects", null, table([{ title: "tensor" }, { title: "step", number: true }, { title: "microbatch", number: true }, { title: "ranks" }, { title: "error", number: true }, { title: "expected", number: true }, { title: "state" }, { title: "details" }], rows, { id: "suspects" }));
}
const EFFECT_WORDS = { model: "different model", weights: "different weights", data: "different data", optimizer: "different updates", precision: "rounding", kernels: "kernels: rounding", versions: "different software", unknown: "unknown effect", layout: "layout: rounding", none: "no effect on the numerics" };
function setupCard() {
  const rowOf = (entry) => h("tr", null, h("td", { class: "key" }, entry.name), h("td", { class: "mono" }, plain(entry.golden)), h("td", { class: "mono" }, plain(entry.run)),
    h("td", null, h("span", { class: `badge ${{ model: "bad", weights: "bad", data: "bad", optimizer: "bad", layout: "", none: "" }[entry.effect] ?? "note"}` }, EFFECT_WORDS[entry.effect] || entry.effect)));
  const columns = [{ title: "setting" }, { title: "golden" }, { title: "this run" }, { title: "effect" }];
  const matter = VERSUS.setup.filter((entry) => entry.effect !== "none"), rest = VERSUS.setup.filter((entry) => entry.effect === "none");
  return card("Settings that differ", matter.length ? "arguments, environment, versions, sources, weights and data that differ; largest effect on the numerics first" : "No setting differs that can change the numerics: arguments, environment, versions, sources.",
    matter.length ? table(columns, matter.map(rowOf), { id: "setup-differences" }) : null,
    rest.length ? h("details", null, h("summary", null, `${plural(rest.length, "more setting")} without effect on the numerics`), table(columns, rest.map(rowOf))) : null);
}
