// Lines over steps as SVG: gaps and a red mark where a value is not finite, a cross-hair that reads all lines.
function ticks(low, high, count) {
  if (low === high) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let v = Math.ceil(low / size) * size; v <= high + size * 1e-9; v += size) found.push(Math.abs(v) < size * 1e-9 ? 0 : v);
  return found;
}
function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.max(1, Math.ceil((to - from) / 5));
  const pick = (digits) => {
    const found = [];
    for (let p = from; p <= to; p += every) for (const d of digits) if (d * 10 ** p >= low * 0.999 && d * 10 ** p <= high * 1.001) found.push(d * 10 ** p);
    return found;
  };
  return [[1], [1, 3], [1, 2, 5], [1, 2, 3, 4, 5, 6, 8]].map(pick).find((found) => found.length > 2) || ticks(low, high, 4);
}

// Steps with an alert are marked in every chart.
const ALERT_STEPS = [...new Set(DATA.alerts.map((alert) => alert.step).filter(Number.isFinite))];
// lines: [{label, steps, values, color, dash, bad}]
function lineChart(lines, options = {}) {
  const width = options.width || 640, height = options.height || 210, left = 58, right = 14, top = 10, bottom = 28;
  const wrap = h("div", { class: "plot" });
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const finite = lines.flatMap((line) => line.values.filter((v) => v !== null && Number.isFinite(v)));
  if (!steps.length || !finite.length) {
    wrap.append(h("p", { class: "muted" }, lines.some((line) => line.steps.length) ? "No finite value in any step." : "Nothing recorded."));
    return wrap;
  }
  const log = options.log && finite.every((v) => v > 0);
  let low = Math.min(...finite), high = Math.max(...finite);
  if (!log) { const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1; low -= pad; high += pad; if (Math.min(...finite) >= 0 && low < 0) low = 0; }
  else if (low === high) { low /= 1.5; high *= 1.5; } else { const pad = (high / low) ** 0.06; low /= pad; high *= pad; }
  const first = steps[0], last = steps[steps.length - 1];
  const x = (step) => (first === last ? (left + width - right) / 2 : left + ((step - first) / (last - first)) * (width - left - right));
  const unit = log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
  const y = (v) => height - bottom - unit(v) * (height - top - bottom);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label || "trend by step" });
  const marks = log ? logTicks(low, high) : ticks(low, high, 4);
  // As many digits as it takes to tell the marks apart.
  const digits = [3, 4, 5, 6, 7, 8].find((n) => new Set(marks.map((v) => num(v, n))).size === marks.length) || 8;
  for (const v of marks) {
    svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }));
    svg.append(s("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, num(v, digits)));
  }
  for (const v of ticks(first, last, 7).filter(Number.isInteger)) svg.append(s("text", { x: x(v), y: height - 8, "text-anchor": "middle" }, v));
  const badSteps = [...new Set(lines.flatMap((line) => line.steps.filter((_, i) => line.bad && at(line.bad, i) > 0)))];
  const half = steps.length > 1 ? (x(steps[1]) - x(steps[0])) / 2 : 12;
  for (const step of badSteps) svg.append(s("rect", { class: "band", x: x(step) - half, width: 2 * half, y: top, height: height - top - bottom }));
  for (const step of ALERT_STEPS.filter((step) => step >= first && step <= last).slice(0, 20)) {
    const told = DATA.alerts.filter((alert) => alert.step === step).map((alert) => alert.text).slice(0, 4).join("\n");
    svg.append(s("line", { class: "alert", x1: x(step), x2: x(step), y1: top, y2: height - bottom }, s("title", null, told)), s("text", { class: "gone", x: x(step), y: top + 4, "text-anchor": "middle" }, "▼"));
  }
  for (const line of lines) {
    let path = "", open = false;
    line.steps.forEach((step, i) => {
      const v = line.values[i];
      if (v === null || (log && v <= 0)) { open = false; return; }
      path += `${open ? "L" : "M"}${x(step).toFixed(1)} ${y(v).toFixed(1)}`;
      open = true;
    });
    svg.append(s("path", { class: `line${line.dash ? " dash" : ""}`, d: path, css: { stroke: line.color } }));
    if (steps.length <= 40) line.steps.forEach((step, i) => {
      if (line.values[i] !== null && !(log && line.values[i] <= 0)) svg.append(s("circle", { cx: x(step), cy: y(line.values[i]), r: line.dash ? 2 : 2.6, css: { fill: line.color } }));
    });
  }
  if (badSteps.length) svg.append(s("text", { class: "gone", x: Math.min(x(badSteps[0]) + 4, width - 90), y: top + 13 }, `× non-finite`));
  const cross = s("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cross);
  const tip = h("div", { class: "tip" });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), position = ((event.clientX - box.left) / box.width) * width;
    const step = steps.reduce((best, n) => (Math.abs(x(n) - position) < Math.abs(x(best) - position) ? n : best), steps[0]);
    cross.setAttribute("x1", x(step)); cross.setAttribute("x2", x(step)); cross.setAttribute("visibility", "visible");
    tip.textContent = [`step ${step}`, ...lines.map((line) => {
      const i = line.steps.indexOf(step), bad = i >= 0 && line.bad ? at(line.bad, i) : 0;
      return `${line.label}: ${i < 0 ? "–" : num(line.values[i], 6)}${bad ? ` (${bad} non-finite)` : ""}`;
    })].join("\n");
    tip.style.display = "block";
    const side = (x(step) / width) * box.width;
    tip.style.left = `${side > box.width * 0.6 ? side - tip.offsetWidth - 12 : side + 12}px`;
    tip.style.top = "14px";
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; cross.setAttribute("visibility", "hidden"); });
  wrap.append(svg, tip);
  return wrap;
}
function lineLegend(lines) {
  return h("div", { class: "legend" }, lines.map((line) => h("span", null, h("i", { css: { background: line.color, height: "3px", width: "18px", "vertical-align": "4px", border: "0" } }), line.label)));
}
