// Heat maps on canvas: rows of layers or ranks over steps. Non-finite cells are red and crossed, whatever the figure.
function heatColors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    stops: [0, 1, 2, 3].map((i) => read(`--heat-${i}`).split(" ").map(Number)),
    none: `rgb(${read("--heat-none")})`, bad: read("--bad"), ink: read("--muted"), surface: read("--surface"),
  };
}
function mix(stops, share) {
  const place = Math.max(0, Math.min(1, share)) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(place)), f = place - i;
  return `rgb(${stops[i].map((v, k) => Math.round(v + (stops[i + 1][k] - v) * f)).join(" ")})`;
}
// Maps values to 0..1: logarithmic where they are positive and span more than a decade.
function scaleOf(values) {
  const finite = values.filter((v) => v !== null && Number.isFinite(v));
  const low = Math.min(...finite), high = Math.max(...finite);
  const positive = finite.filter((v) => v > 0), least = Math.min(...positive);
  if (!finite.length || low === high) return { low, high, log: false, of: () => (high > 0 ? 0.5 : 0) };
  if (low >= 0 && positive.length && high / least > 10) return { low: least, high, log: true, of: (v) => (v <= 0 ? 0 : Math.log(v / least) / Math.log(high / least)) };
  return { low, high, log: false, of: (v) => (v - low) / (high - low) };
}
const FIGURES = [["norm", "norm"], ["absmax", "largest magnitude"], ["zeros", "share of zeros"], ["bad", "non-finite elements"]];
const heatKinds = (map) => [...new Set([...Object.keys(KIND_WORDS), ...Object.keys(map.kinds)])].filter((kind) => map.kinds[kind]).map((kind) => [kind, KIND_WORDS[kind] || kind]);
const BAD_WORDS = { yes: "holds NaN or Inf", no: "no NaN, no Inf", each: "non-finite" };

function heatMap(map, steps, kind, figure, rowLabel, onPick, words = BAD_WORDS) {
  const tables = map.kinds[kind];
  const wrap = h("div", { class: "heat" });
  if (!tables) { wrap.append(h("p", { class: "muted" }, "Nothing recorded of this kind.")); return wrap; }
  const rows = map.names.map((name, i) => ({ name, i })).filter(({ i }) => list(tables[figure][i], steps.length).some((v) => v !== null));
  const cell = (r, c, what = figure) => at(tables[what][rows[r].i], c);
  // Each row on its own scale would hide growth along the depth of the model; one scale for all shows it.
  const scale = words.scale || scaleOf(rows.flatMap((_, r) => steps.map((_, c) => cell(r, c))));
  const canvas = h("canvas", { role: "img", "aria-label": `${figure} of ${kind} by ${rowLabel} and step` });
  const tip = h("div", { class: "tip" }), left = 112, bottom = 22;
  const size = Math.max(9, Math.min(26, Math.floor(420 / Math.max(rows.length, 1))));
  const height = rows.length * size + bottom;
  function draw() {
    const width = wrap.clientWidth || 900, ratio = window.devicePixelRatio || 1, colors = heatColors();
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
    const g = canvas.getContext("2d"), step = (width - left - 4) / steps.length, gap = step > 5 && size > 10 ? 1 : 0;
    g.scale(ratio, ratio); g.font = "11.5px system-ui, sans-serif"; g.textBaseline = "middle";
    const every = Math.ceil(13 / size);
    rows.forEach((row, r) => {
      g.fillStyle = colors.ink; g.textAlign = "right";
      const text = typeof row.name === "number" ? `rank ${row.name}` : String(row.name);
      if (r % every === 0) g.fillText(text.length > 17 ? `${text.slice(0, 16)}…` : text, left - 8, r * size + size / 2);
      steps.forEach((_, c) => {
        const v = cell(r, c), bad = cell(r, c, "bad") > 0, x = left + c * step, y = r * size;
        g.fillStyle = bad ? colors.bad : v === null ? colors.none : mix(colors.stops, scale.of(v));
        g.fillRect(x, y, Math.max(step - gap, 0.5), size - gap);
        if (bad && step > 7 && size > 9) {
          const half = Math.min(step, size) * 0.18, mx = x + (step - gap) / 2, my = y + (size - gap) / 2;
          g.strokeStyle = colors.surface; g.lineWidth = 1.4; g.beginPath();
          g.moveTo(mx - half, my - half); g.lineTo(mx + half, my + half); g.moveTo(mx + half, my - half); g.lineTo(mx - half, my + half); g.stroke();
        }
      });
    });
    g.fillStyle = colors.ink; g.textAlign = "center";
    const apart = Math.ceil(46 / step);
    steps.forEach((n, c) => { if (c % apart === 0) g.fillText(String(n), left + (c + 0.5) * step, height - bottom / 2 + 2); });
  }
  function find(event) {
    const box = canvas.getBoundingClientRect(), step = (box.width - left - 4) / steps.length;
    const c = Math.floor((event.clientX - box.left - left) / step), r = Math.floor((event.clientY - box.top) / size);
    return r >= 0 && r < rows.length && c >= 0 && c < steps.length ? { r, c, x: event.clientX - box.left, y: event.clientY - box.top, width: box.width } : null;
  }
  canvas.addEventListener("pointermove", (event) => {
    const hit = find(event);
    if (!hit) { tip.style.display = "none"; return; }
    const name = rows[hit.r].name, bad = cell(hit.r, hit.c, "bad");
    tip.textContent = `${typeof name === "number" ? `rank ${name}` : name}, step ${steps[hit.c]}\n${figure}: ${figure === "zeros" ? percent(cell(hit.r, hit.c)) : num(cell(hit.r, hit.c), 5)}${bad ? `\n${bad} ${words.each}` : ""}`;
    tip.style.display = "block";
    tip.style.left = `${hit.x > hit.width * 0.7 ? hit.x - tip.offsetWidth - 12 : hit.x + 14}px`; tip.style.top = `${hit.y + 10}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  if (onPick) canvas.addEventListener("click", (event) => { const hit = find(event); if (hit) onPick(rows[hit.r].name, steps[hit.c]); });
  wrap.append(canvas, tip);
  redraws.push(() => { if (wrap.isConnected) draw(); });
  requestAnimationFrame(draw);
  const ends = [scale.low, scale.high].map((v) => (figure === "zeros" ? percent(v) : num(v, 3)));
  const anyBad = rows.some((_, r) => steps.some((_, c) => cell(r, c, "bad") > 0));
  const legend = h("div", { class: "legend" }, ends[0], h("span", { class: "ramp" }), ends[1], words.unit ? h("span", null, words.unit) : null, scale.log ? h("span", null, "log") : null,
    anyBad ? h("span", null, h("i", { class: "v-bad" }), words.yes) : h("span", null, words.no));
  return h("div", null, legend, wrap);
}

// A heat map with its two choices; keeps them when redrawn.
function heatCard(title, sub, map, rowLabel, onPick, start = {}) {
  const kinds = heatKinds(map), choice = { kind: start.kind && map.kinds[start.kind] ? start.kind : (kinds[0] || [""])[0], figure: start.figure || "norm" };
  const place = h("div");
  const show = () => place.replaceChildren(heatMap(map, DATA.heat.steps, choice.kind, choice.figure, rowLabel, onPick));
  show();
  return card(title, sub, h("div", { class: "controls" },
    select("of", kinds, choice.kind, (value) => { choice.kind = value; show(); }),
    select("show", FIGURES, choice.figure, (value) => { choice.figure = value; show(); })), place);
}
