// The ranks with their coordinates, and replicas that do not agree.
const AXES = ["tp", "cp", "ep", "dp"];

// More ranks than this are drawn as small cells; their words are in the tip.
const MANY_RANKS = 64;

function rankCard(rank, odd) {
  const used = ["tp", "pp", "dp", "cp", "ep"].filter((axis) => ((DATA.run.sizes || {})[axis] || 1) > 1);
  const silent = !rank.rows, state = rank.bad ? "bad" : odd.has(rank.rank) ? "odd" : silent ? "silent" : "";
  if (DATA.ranks.length > MANY_RANKS) {
    const place = used.map((axis) => `${axis}${rank[axis]}`).join(" "), words = [rank.bad ? `${rank.bad} non-finite` : "", odd.has(rank.rank) ? "differs from its replicas" : "", silent ? "recorded nothing" : `${rank.rows} rows`, ...rank.faults];
    return h("div", { class: `rank small ${state}`, "data-rank": rank.rank, title: `rank ${rank.rank}: ${place}; layers ${span(rank.layers)}; ${words.filter(Boolean).join("; ")}` }, rank.rank);
  }
  return h("div", { class: `rank ${state}`, "data-rank": rank.rank }, h("b", null, rank.rank), " ",
    h("span", { class: "muted mono" }, used.map((axis) => `${axis}${rank[axis] === null || rank[axis] === undefined ? "?" : rank[axis]}`).join(" ")),
    h("div", { class: "muted" }, rank.layers.length ? `layers ${span(rank.layers)}` : ""), h("div", { class: "muted" }, silent ? "recorded nothing" : `${rank.rows.toLocaleString("en")} rows`), paceOf(rank),
    rank.bad ? h("span", { class: "badge bad" }, `${rank.bad.toLocaleString("en")} non-finite`) : null, odd.has(rank.rank) ? [" ", h("span", { class: "badge note" }, "differs")] : null,
    rank.faults.length ? [" ", h("span", { class: "badge bad", title: rank.faults[0] }, "fault")] : null, rank.closed === false ? [" ", h("span", { class: "badge note" }, "not closed")] : null);
}

// Seconds a step and memory of a rank; the bar is against the slowest.
function paceOf(rank) {
  if (!rank.seconds) return null;
  const slowest = Math.max(...DATA.ranks.map((other) => other.seconds || 0));
  return h("div", { class: "muted pace" }, h("i", { css: { width: `${(rank.seconds / slowest) * 60}px` } }), ` ${num(rank.seconds, 3)} s/step${rank.memory ? ` · ${sizeOf(rank.memory)}` : ""}`);
}
function sizeOf(bytes) { const units = ["B", "KiB", "MiB", "GiB", "TiB"]; let i = 0; while (bytes >= 1024 && i < 4) { bytes /= 1024; i += 1; } return `${i ? bytes.toFixed(1) : bytes} ${units[i]}`; }

function commCard() {
  const comm = DATA.comm;
  if (!comm.count) return null;
  const sums = comm.totals.map((entry) => h("tr", null, h("td", { class: "mono" }, entry.op), h("td", null, entry.group), h("td", { class: "n" }, entry.calls.toLocaleString("en")), h("td", { class: "n" }, sizeOf(entry.bytes))));
  const rows = comm.first.map((x) => h("tr", null, h("td", { class: "mono" }, x.op), h("td", null, x.op === "send" ? `${x.ranks[0]} → ${x.ranks[1]}` : `${x.group}: ${span(x.ranks)}`), h("td", { class: "key" }, x.module), h("td", { class: "n" }, x.microbatch === null ? "–" : x.microbatch), h("td", null, x.phase), h("td", { class: "n" }, sizeOf(x.bytes)),
    h("td", null, x.finding ? h("span", { class: "badge bad" }, x.finding) : h("span", { class: "badge good" }, "matches"))));
  return card("Communication", `step ${comm.step}: ${plural(comm.count, "exchange")}, inputs and outputs matched across ranks; ${comm.wrong ? `${comm.wrong} inconsistent` : "all consistent"}`,
    table([{ title: "operation" }, { title: "group" }, { title: "calls", number: true }, { title: "bytes per rank", number: true }], sums),
    h("div", { class: "long" }, table([{ title: "operation" }, { title: "ranks" }, { title: "module" }, { title: "microbatch", number: true }, { title: "phase" }, { title: "size", number: true }, { title: "" }], rows, { id: "communication" })));
}

function whoTab() {
  const odd = new Set(DATA.replicas.first.flatMap((entry) => minority(entry.groups)));
  const stages = new Map();
  for (const rank of DATA.ranks) { const pp = rank.pp || 0; if (!stages.has(pp)) stages.set(pp, []); stages.get(pp).push(rank); }
  const width = DATA.ranks.length > MANY_RANKS ? 44 : 168;
  const rows = [...stages].sort((a, b) => a[0] - b[0]).map(([pp, ranks]) => {
    ranks.sort((a, b) => AXES.slice().reverse().map((axis) => (a[axis] || 0) - (b[axis] || 0)).find((d) => d) || a.rank - b.rank);
    return h("div", { class: "stage-row" }, h("div", { class: "sub" }, `pipeline stage ${pp}`), h("div", { class: "grid-ranks", css: { "grid-template-columns": `repeat(auto-fill, minmax(${width}px, 1fr))` } }, ranks.map((rank) => rankCard(rank, odd))));
  });
  // Among a thousand cells a red one is lost.
  const told = [["hold non-finite values", DATA.ranks.filter((rank) => rank.bad)], ["differ from their replicas", DATA.ranks.filter((rank) => odd.has(rank.rank))], ["had a fault", DATA.ranks.filter((rank) => rank.faults.length)], ["recorded nothing", TENSORS.length ? DATA.ranks.filter((rank) => !rank.rows) : []]]
    .filter(([, ranks]) => ranks.length && DATA.ranks.length > MANY_RANKS).map(([words, ranks]) => h("p", { class: "bad-text" }, `${plural(ranks.length, "rank")} ${words}: ${span(ranks.map((rank) => rank.rank).sort((a, b) => a - b))}`));
  return h("div", { class: "stack" },
    card("Ranks", `${plural(DATA.run.world || 1, "rank")}, ${layoutWords(DATA.run.sizes)}; each with its coordinates${DATA.ranks.length < DATA.run.world ? `; the first ${DATA.ranks.length} are shown` : ""}`, told, rows),
    replicasCard(), commCard(), heatCard("Ranks by step", "values of each rank, shards not merged", DATA.heat.ranks, "rank", null));
}
// Of several values, the ranks that are outvoted; all of them when there is no majority.
function minority(groups) {
  const most = Math.max(...groups.map((group) => group.ranks.length)), winners = groups.filter((group) => group.ranks.length === most);
  return groups.filter((group) => winners.length > 1 || group !== winners[0]).flatMap((group) => group.ranks);
}
function replicasCard() {
  const replicas = DATA.replicas;
  if (!replicas.total) return card("Replicas", "All replicas hold identical values.");
  const rows = replicas.first.map((entry) => h("tr", { class: "pick", onclick: () => showTensor(entry.key, entry.step) }, h("td", { class: "n" }, entry.step), h("td", null, h("span", { class: "key" }, entry.name), " ", h("span", { class: "muted" }, `${KIND_WORDS[entry.kind] || entry.kind} ${entry.kind === "activation" || entry.kind === "gradient" ? entry.io : ""}`)),
    h("td", null, entry.groups.slice(0, 6).map((group) => h("div", { class: "mono" }, `ranks ${span(group.ranks)}: norm ${num(group.norm, 6)}${group.bad ? `, ${group.bad} non-finite` : ""}`)))));
  return card("Replicas that disagree", `${plural(replicas.total, "tensor")} of ${plural(replicas.names, "name")} in steps ${span(replicas.steps)}; first occurrence of each, earliest first`,
    h("div", { class: "long" }, table([{ title: "step", number: true }, { title: "tensor" }, { title: "values" }], rows, { id: "replicas" })));
}
