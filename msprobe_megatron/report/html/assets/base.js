// The data, and the few things that every part of the page needs. Names only ever become text nodes.
const DATA = JSON.parse(document.getElementById("data").textContent);
const VERSUS = DATA.versus;
const SVG = "http://www.w3.org/2000/svg";
const redraws = [];

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "css") Object.entries(value).forEach(([key, item]) => element.style.setProperty(key, item));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(9)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function num(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(Math.max(1, digits - 2)).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}
const percent = (value) => (value === null || value === undefined ? "–" : value === 0 ? "0" : `${num(100 * value, 3)} %`);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// 0,1,2,5 -> "0–2, 5"
function span(numbers) {
  const parts = [];
  for (let i = 0; i < numbers.length; ) {
    let j = i;
    while (j + 1 < numbers.length && numbers[j + 1] === numbers[j] + 1) j++;
    parts.push(j === i ? `${numbers[i]}` : `${numbers[i]}–${numbers[j]}`);
    i = j + 1;
  }
  return parts.length > 12 ? `${parts.slice(0, 12).join(", ")}, …` : parts.join(", ");
}

const keyOf = (t) => `${t.kind}|${t.name}|${t.io}|${t.path}|${t.phase}`;
const at = (values, i) => (Array.isArray(values) ? values[i] : values);
const list = (values, length) => (Array.isArray(values) ? values : new Array(length).fill(values));
const KIND_WORDS = {
  activation: "activation", gradient: "gradient of activation", parameter: "weight", grad_reduced: "weight gradient, reduced",
  grad_unreduced: "weight gradient, before reduction", grad_clipped: "weight gradient, clipped",
  optimizer_state: "optimizer state", update: "update", data: "data", loss: "loss",
};
const STATE_WORDS = {
  agree: "agrees", diverged: "diverged here", inherited: "inherited", only_left: "only in golden", only_right: "only in this run",
  layout: "not comparable",
};
function labelOf(t) {
  const io = t.kind === "activation" ? t.io : t.kind === "gradient" ? `gradient of ${t.io}` : KIND_WORDS[t.kind] || t.kind;
  return `${io}${t.path ? ` ${t.path}` : ""}${t.phase === "recompute" ? " (recomputed)" : ""}`;
}

const STEPS = DATA.series.steps;
const TENSORS = DATA.series.tensors;
const BY_KEY = new Map(TENSORS.map((t) => [keyOf(t), t]));
const BY_NAME = new Map();
for (const t of TENSORS) {
  if (!BY_NAME.has(t.name)) BY_NAME.set(t.name, []);
  BY_NAME.get(t.name).push(t);
}
const GOLDEN = new Map(VERSUS ? VERSUS.series.tensors.map((t) => [keyOf(t), t]) : []);
const ODD = new Set(DATA.replicas.first.map((entry) => entry.key));
const STATISTICS = {
  norm: ["norm", (t, i) => at(t.norm, i)],
  absmax: ["largest magnitude", (t, i) => {
    const low = at(t.min, i), high = at(t.max, i);
    return low === null || high === null ? null : Math.max(Math.abs(low), Math.abs(high));
  }],
  mean: ["mean", (t, i) => at(t.mean, i)],
  min: ["min", (t, i) => at(t.min, i)],
  max: ["max", (t, i) => at(t.max, i)],
  zeros: ["share of zeros", (t, i) => at(t.zeros, i)],
  bad: ["non-finite elements", (t, i) => at(t.bad, i)],
};
const hasBad = (t) => (Array.isArray(t.bad) ? t.bad.some((n) => n > 0) : t.bad > 0);

function table(columns, rows, attributes) {
  const head = h("tr", null, columns.map((c) => h("th", { class: c.number ? "n" : null, scope: "col" }, c.title)));
  return h("div", { class: "scroll" }, h("table", attributes, h("thead", null, head), h("tbody", null, rows)));
}
function select(label, options, value, change) {
  const box = h("select", { "aria-label": label, onchange: (event) => change(event.target.value) },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)));
  return h("label", null, label, box);
}
function copyButton(text) {
  const button = h("button", { class: "copy", type: "button", onclick: () => {
    const done = () => { button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1200); };
    if (navigator.clipboard && window.isSecureContext) navigator.clipboard.writeText(text).then(done, () => {});
    else { const area = h("textarea", null); area.value = text; document.body.append(area); area.select(); document.execCommand("copy"); area.remove(); done(); }
  } }, "copy");
  return button;
}
const card = (title, sub, ...children) => h("div", { class: "card" }, title ? h("h2", null, title) : null, sub ? h("div", { class: "sub" }, sub) : null, children);
