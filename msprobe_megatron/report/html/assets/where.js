// The model as a tree, coloured by verdict or figure; a click shows a name's tensors, their shards and the call stack.
const where = { color: "verdict", kind: "", step: STEPS.length - 1, name: "", key: "", open: new Set(), query: "" };
let treePlace, detailPlace;

// Nodes: {label, name, children: Map, tensors: []}; one root a stage.
function buildTree(stage) {
  const root = { label: "", name: "", children: new Map(), order: 0 };
  for (const name of stage.names) {
    let node = root, path = "";
    for (const part of splitName(name)) {
      path = path ? `${path}.${part}` : part;
      if (!node.children.has(part)) node.children.set(part, { label: part, name: path, children: new Map() });
      node = node.children.get(part);
    }
  }
  return root;
}
// "decoder.layers.3.mlp" -> decoder, layers.3, mlp: a layer is one node. Odd names with no plain parts stay whole.
function splitName(name) {
  if (/[<>\s]/.test(name)) return [name];
  const parts = name.split("."), joined = [];
  for (const part of parts) {
    if (/^\d+$/.test(part) && joined.length) joined[joined.length - 1] += `.${part}`;
    else joined.push(part);
  }
  return joined;
}
const TREES = DATA.stages.map((stage) => ({ stage, root: buildTree(stage) }));

const VERDICT_ORDER = { none: 0, layout: 1, good: 1, agree: 2, only_left: 3, only_right: 3, replica: 4, inherited: 5, diverged: 6, bad: 7 };
const ODD_SINCE = new Map(DATA.replicas.first.map((entry) => [entry.key, entry.step]));
// The model and its block are in every stage: there it counts what this stage's ranks hold, where rows of ranks are kept.
const SHARED = new Set(DATA.stages.flatMap((stage, n) => stage.names.filter((name) => DATA.stages.some((other, m) => m !== n && other.names.includes(name)))));
function badIn(t, i, stage) {
  if (!(at(t.bad, i) > 0)) return false;
  const rows = SHARED.has(t.name) ? (DATA.shards.rows[keyOf(t)] || []).filter((row) => row[0] === STEPS[i]) : [];
  return !rows.length || rows.some((row) => stage.ranks.includes(row[1]) && row[7] > 0);
}
function verdictOf(t, i, stage) {
  if (badIn(t, i, stage)) return "bad";
  const key = keyOf(t), state = VERSUS && VERSUS.states[key], since = ODD_SINCE.get(key);
  if (state && state[0] !== "agree" && STEPS[i] >= state[1]) return state[0];
  if (since !== undefined && STEPS[i] >= since) return "replica";
  return state ? "agree" : VERSUS ? "none" : "good";
}
// Worst verdict of a name and all below it, in the chosen step, of the chosen kind (or all).
function nodeVerdict(node, stage) {
  let worst = "none";
  const take = (v) => { if (VERDICT_ORDER[v] > VERDICT_ORDER[worst]) worst = v; };
  (BY_NAME.get(node.name) || []).forEach((t) => { if (!where.kind || t.kind === where.kind) take(verdictOf(t, where.step, stage)); });
  node.children.forEach((child) => take(nodeVerdict(child, stage)));
  return worst;
}
const FIRST = DATA.verdict.findings.find((finding) => BY_KEY.has(finding.key));
const FIRST_NAME = FIRST ? BY_KEY.get(FIRST.key).name : null;
// A module's own figure is that of its output; a node without one shows the largest below it.
function nodeValue(node, statistic, kind, step) {
  const own = (BY_NAME.get(node.name) || []).filter((t) => t.kind === (kind || "activation"));
  const shown = own.filter((t) => t.io === "output");
  const values = (shown.length ? shown : own).map((t) => STATISTICS[statistic][1](t, step)).filter((v) => v !== null && v !== undefined);
  if (values.length && statistic !== "bad") return Math.max(...values);
  const below = [...node.children.values()].map((child) => nodeValue(child, statistic, kind, step)).filter((v) => v !== null);
  const all = statistic === "bad" ? [...own.map((t) => at(t.bad, step)), ...below].filter((v) => v !== null) : below;
  return all.length ? Math.max(...all) : null;
}
function matches(node, query) {
  if (!query) return true;
  return node.name.toLowerCase().includes(query) || classOf(node.name).toLowerCase().includes(query) || [...node.children.values()].some((child) => matches(child, query));
}
// A module may have the name of something that every object has.
const siteOf = (name) => (Object.hasOwn(DATA.sites.modules, name) ? DATA.sites.modules[name] : null);
function classOf(name) {
  const site = siteOf(name);
  return site ? site.class : "";
}

function drawTree() {
  const query = where.query.trim().toLowerCase(), figures = where.color !== "verdict";
  const values = [];
  const collect = (node) => { if (node.name) values.push(nodeValue(node, where.color, where.kind, where.step)); node.children.forEach(collect); };
  if (figures) TREES.forEach(({ root }) => collect(root));
  const scale = figures ? scaleOf(values) : null, colors = heatColors();
  let shown = 0;
  const item = (node, stage) => {
    if (!matches(node, query)) return null;
    shown++;
    const id = `${stage.pp}/${node.name}`, leaf = node.children.size === 0, open = query ? true : where.open.has(id);
    const swatch = h("span", { class: "swatch" }), text = h("span", { class: "value mono" });
    const verdict = nodeVerdict(node, stage);
    if (figures) {
      const value = nodeValue(node, where.color, where.kind, where.step), bad = nodeValue(node, "bad", where.kind, where.step) > 0;
      swatch.style.background = bad ? colors.bad : value === null ? "transparent" : mix(colors.stops, scale.of(value));
      text.textContent = value === null ? "" : where.color === "zeros" ? percent(value) : num(value, 4);
    } else {
      swatch.classList.add(`v-${verdict}`);
      if (verdict === "bad") { text.textContent = "non-finite"; text.classList.add("bad-text"); }
      else if (verdict === "diverged") { text.textContent = "diverged"; text.classList.add("bad-text"); }
      else if (verdict === "replica") text.textContent = "replicas differ";
      else if (verdict === "inherited") text.textContent = "inherited";
    }
    if (node.name === FIRST_NAME) { text.textContent = "first here"; text.classList.add("badge", "bad"); }
    if (verdict === "bad" || verdict === "diverged") swatch.textContent = "×";
    const button = h("button", { class: `node${node.name === where.name ? " on" : ""}`, type: "button", role: "treeitem", title: node.name,
      "aria-expanded": leaf ? null : String(open), "data-name": node.name, onclick: (event) => {
        const fold = event.target.classList.contains("fold");
        if (!leaf && (fold || !where.open.has(id) || where.name === node.name)) where.open.has(id) ? where.open.delete(id) : where.open.add(id);
        if (!fold) { where.name = node.name; where.key = ""; drawDetail(); }
        drawTree();
      } }, h("span", { class: "fold" }, leaf ? "" : open ? "▾" : "▸"), swatch, h("span", { class: "name" }, node.label), h("span", { class: "class" }, classOf(node.name)), text);
    return h("li", null, button, !leaf && open ? h("ul", { role: "group" }, [...node.children.values()].map((child) => item(child, stage))) : null);
  };
  const stages = TREES.map(({ stage, root }) => {
    const children = [...root.children.values()].map((node) => item(node, stage)).filter(Boolean);
    const title = h("div", { class: "muted", css: { padding: "6px 4px 2px", "font-weight": "600" } }, TREES.length > 1 ? `stage ${stage.pp} · ${stage.ranks.length === 1 ? "rank" : "ranks"} ${span(stage.ranks)}` : `model · ${stage.ranks.length === 1 ? "rank" : "ranks"} ${span(stage.ranks)}`);
    return children.length ? [title, h("ul", { role: "tree" }, children)] : null;
  });
  const legend = figures
    ? h("div", { class: "legend" }, num(scale.low, 3), h("span", { class: "ramp" }), num(scale.high, 3), h("span", null, h("i", { class: "v-bad" }), "non-finite"))
    : h("div", { class: "legend" }, (VERSUS ? [["agree", "agrees"], ["diverged", "diverged here or non-finite"], ["inherited", "inherited"], ["layout", "not comparable"]] : [["good", "finite"], ["bad", "non-finite"], ["replica", "replicas differ"]])
      .map(([state, words]) => h("span", null, h("i", { class: `v-${state}` }), words)));
  const scrolled = treePlace.querySelector(".tree") ? treePlace.querySelector(".tree").scrollTop : 0;
  const tree = h("div", { class: "tree" }, shown ? stages : h("p", { class: "muted" }, "No name contains this."));
  treePlace.replaceChildren(legend, tree);
  tree.scrollTop = scrolled;
}

function openTo(name) {
  for (const { stage, root } of TREES) {
    const walk = (node, trail) => {
      if (node.name === name) { trail.forEach((id) => where.open.add(id)); return; }
      node.children.forEach((child) => walk(child, node.name ? [...trail, `${stage.pp}/${node.name}`] : trail));
    };
    walk(root, []);
  }
}

function drawDetail() {
  const tensors = (BY_NAME.get(where.name) || []).slice(), i = where.step;
  if (!where.name) { detailPlace.replaceChildren(card("Choose a module", "Click a name on the left: its tensors, shards, trend and call stack are shown here.")); return; }
  if (!tensors.length) {
    const inside = [...BY_NAME.keys()].filter((name) => name.startsWith(`${where.name}.`));
    detailPlace.replaceChildren(card(where.name, `No tensor of its own on this page; ${plural(inside.length, "name")} below it.`));
    return;
  }
  if (!BY_KEY.has(where.key) || BY_KEY.get(where.key).name !== where.name) where.key = keyOf(tensors.find((t) => hasBad(t)) || tensors.find((t) => t.io === "output") || tensors[0]);
  const columns = [{ title: "tensor" }, { title: "norm", number: true }, ...(VERSUS ? [{ title: "golden", number: true }] : []), { title: "min", number: true }, { title: "max", number: true },
    { title: "mean", number: true }, { title: "zeros", number: true }, { title: "non-finite", number: true }, ...(VERSUS ? [{ title: "verdict" }] : [])];
  const rows = tensors.map((t) => {
    const golden = GOLDEN.get(keyOf(t)), gi = VERSUS ? VERSUS.series.steps.indexOf(STEPS[i]) : -1, state = VERSUS && VERSUS.states[keyOf(t)], bad = at(t.bad, i);
    return h("tr", { class: `pick${keyOf(t) === where.key ? " on" : ""}`, "data-key": keyOf(t), onclick: () => { where.key = keyOf(t); drawDetail(); } },
      h("td", null, h("span", { class: "key" }, labelOf(t)), " ", h("span", { class: "muted" }, `${t.dtype} ${t.shape}`), ODD.has(keyOf(t)) ? [" ", h("span", { class: "badge note" }, "replicas differ")] : null),
      h("td", { class: "n" }, num(at(t.norm, i), 5)), VERSUS ? h("td", { class: "n" }, golden && gi >= 0 ? num(at(golden.norm, gi), 5) : "–") : null,
      h("td", { class: "n" }, num(at(t.min, i))), h("td", { class: "n" }, num(at(t.max, i))), h("td", { class: "n" }, num(at(t.mean, i))),
      h("td", { class: "n" }, percent(at(t.zeros, i))), h("td", { class: `n${bad ? " bad-text" : ""}` }, bad ? `${bad} of ${at(t.numel, i)}` : num(bad)),
      VERSUS ? h("td", null, state ? h("span", { class: `badge ${{ agree: "good", diverged: "bad", inherited: "note" }[state[0]] || ""}` }, `${STATE_WORDS[state[0]]}${state[0] === "diverged" || state[0] === "inherited" ? ` since ${state[1]}` : ""}`) : "–") : null);
  });
  const stage = DATA.stages.filter((entry) => entry.names.includes(where.name)).map((entry) => `stage ${entry.pp} (ranks ${span(entry.ranks)})`).join(", ");
  detailPlace.replaceChildren(...[
    card(where.name, [classOf(where.name) || tensors[0].op, stage].filter(Boolean).join(" · "), h("div", { class: "muted" }, `step ${STEPS[i]}, all microbatches and shards merged`), table(columns, rows, { id: "tensors" })),
    trendOf(BY_KEY.get(where.key)), shardsOf(BY_KEY.get(where.key)), stackOf(where.name)].filter(Boolean));
}

function trendOf(t) {
  const golden = GOLDEN.get(keyOf(t)), lines = [{ label: VERSUS ? "this run" : "norm", steps: STEPS, values: list(t.norm, STEPS.length), color: "var(--run)", bad: t.bad }];
  if (golden) lines.push({ label: "golden run", steps: VERSUS.series.steps, values: list(golden.norm, VERSUS.series.steps.length), color: "var(--golden)", dash: true });
  return card(`Norm by step: ${labelOf(t)}`, null, golden ? lineLegend(lines) : null, lineChart(lines, { height: 170, width: 780, label: `norm of ${labelOf(t)}` }),
    h("button", { class: "link", type: "button", onclick: () => { addTrend(keyOf(t)); show("when"); } }, "more in trends"));
}
function shardsOf(t) {
  const all = DATA.shards.rows[keyOf(t)] || [], step = STEPS[where.step];
  const shownStep = DATA.shards.steps.includes(step) ? step : DATA.shards.steps[DATA.shards.steps.length - 1];
  const rows = all.filter((row) => row[0] === shownStep);
  if (!rows.length) return null;
  const reason = t.reason ? h("p", { class: "muted" }, `Not merged: ${t.reason}`) : null;
  return card("Values of each rank", `step ${shownStep}${shownStep === step ? "" : `; ranks are kept for steps ${DATA.shards.steps.join(", ")}`}`, reason,
    h("div", { class: "long" }, table([{ title: "rank", number: true }, { title: "shape" }, { title: "shard" }, { title: "norm", number: true }, { title: "min", number: true }, { title: "max", number: true }, { title: "mean", number: true }, { title: "non-finite", number: true }],
      rows.map((row) => h("tr", null, h("td", { class: "n" }, row[1]), h("td", { class: "mono" }, DATA.shards.texts[row[8]]), h("td", { class: "mono" }, DATA.shards.texts[row[9]] || "whole"),
        h("td", { class: "n" }, num(row[2], 5)), h("td", { class: "n" }, num(row[3])), h("td", { class: "n" }, num(row[4])), h("td", { class: "n" }, num(row[5])), h("td", { class: `n${row[7] ? " bad-text" : ""}` }, row[7]))), { id: "shards" })));
}
// The stack of a weight is that of the module that owns it.
function stackOf(name) {
  const site = siteOf(name) || siteOf(name.split(".").slice(0, -1).join("."));
  if (!site || !site.stack.length) return null;
  return card("Called from", "innermost first", h("ol", { class: "frames mono" }, site.stack.map((index) => {
    const frame = DATA.sites.frames[index], cut = frame.lastIndexOf(" "), file = cut < 0 ? frame : frame.slice(0, cut);
    const inside = file.split("site-packages/").pop(), parts = inside.split("/");
    return h("li", { title: file }, inside === file ? parts.slice(-3).join("/") : inside, cut < 0 ? null : [" ", h("span", { class: "fn" }, frame.slice(cut + 1))]);
  })));
}

function showTensor(key, step) {
  const t = BY_KEY.get(key);
  if (!t) return;
  where.name = t.name; where.key = key;
  if (step !== null && step !== undefined && STEPS.includes(step)) where.step = STEPS.indexOf(step);
  openTo(t.name); drawWhere(); show("where");
}
function showPlace(place, step) {
  const layer = /^layer (\d+)$/.exec(place);
  const name = [...BY_NAME.keys()].find((n) => (layer ? n.endsWith(`layers.${layer[1]}`) : n === place)) || [...BY_NAME.keys()].find((n) => (layer ? n.includes(`layers.${layer[1]}.`) : n.startsWith(place)));
  if (name) showTensor(keyOf(BY_NAME.get(name)[0]), step);
}

let whereControls;
function drawWhere() {
  const kinds = [...new Set(TENSORS.map((t) => t.kind))].filter((kind) => kind !== "loss").map((kind) => [kind, KIND_WORDS[kind] || kind]);
  if (where.color === "verdict") kinds.unshift(["", "all kinds"]);
  const search = h("input", { type: "search", id: "search", placeholder: "Search names and classes", "aria-label": "search", value: where.query, oninput: (event) => { where.query = event.target.value; drawTree(); } });
  whereControls.replaceChildren(search, h("div", { class: "controls", css: { margin: "9px 0 6px" } },
    select("colour", [["verdict", "verdict"], ...Object.entries(STATISTICS).map(([key, [words]]) => [key, words])], where.color, (value) => { where.color = value; if (value !== "verdict" && !where.kind) where.kind = kinds[1][0]; drawWhere(); }),
    select("of", kinds, where.kind, (value) => { where.kind = value; drawTree(); }),
    select("step", STEPS.map((step, i) => [i, step]), where.step, (value) => { where.step = Number(value); drawTree(); drawDetail(); })));
  drawTree(); drawDetail();
}
function whereTab() {
  whereControls = h("div"); treePlace = h("div", { css: { display: "flex", "flex-direction": "column", "min-height": "0" } }); detailPlace = h("div", { class: "stack" });
  const worst = FIRST;
  TREES.forEach(({ stage, root }) => root.children.forEach((node) => { if (node.children.size && node.children.size < 40) where.open.add(`${stage.pp}/${node.name}`); }));
  if (worst) { where.name = BY_KEY.get(worst.key).name; where.key = worst.key; openTo(where.name); if (STEPS.includes(worst.step)) where.step = STEPS.indexOf(worst.step); where.kind = BY_KEY.get(worst.key).kind; }
  else where.name = ([...BY_NAME.keys()].find((name) => /layers\.\d+$/.test(name)) || [...BY_NAME.keys()][0]);
  drawWhere();
  redraws.push(drawTree);
  return h("div", { class: "where-panes" }, h("div", { class: "card tree-pane" }, whereControls, treePlace), detailPlace);
}
