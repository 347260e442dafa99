// What happened to the recording itself: warnings, events, ledger, patches; and how the job was set up.
function plain(value) { return value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value); }
function pairs(object) { return Object.entries(object || {}).map(([name, value]) => h("tr", { "data-row": name.toLowerCase() }, h("td", { class: "key" }, name), h("td", { class: "mono pre" }, plain(value)))); }

function logTab() {
  const log = DATA.log;
  const events = log.events.map((event) => h("tr", null, h("td", { class: "n" }, plain(event.step)), h("td", { class: "n" }, plain(event.rank)), h("td", null, event.event), h("td", { class: "pre" }, event.text)));
  const groups = log.ledgers.groups.map((group) => [h("h3", { css: { margin: "10px 0 2px" } }, `ranks ${span(group.ranks)}`), table([{ title: "what" }, { title: "" }], pairs(group.ledger))]);
  const patches = log.ledgers.patches.map((patch) => h("tr", null, h("td", { class: "mono" }, patch.id), h("td", null, h("span", { class: `badge ${patch.state === "bound" ? "good" : "note"}` }, patch.state)), h("td", { class: "n" }, patch.fired), h("td", null, patch.why || patch.reason)));
  return h("div", { class: "stack" },
    card("Warnings", log.warnings.length ? null : "Everything requested was recorded.", log.warnings.length ? h("ul", null, log.warnings.map((text) => h("li", null, text))) : null),
    card("Events", log.events.length ? "alerts, faults and drops of all ranks" : "No alert, no fault, no drop.", events.length ? h("div", { class: "long" }, table([{ title: "step", number: true }, { title: "rank", number: true }, { title: "event" }, { title: "text" }], events)) : null),
    card("Ledger", "requested, bound, observed and written; equal ranks are grouped", groups),
    card("Patches", null, h("div", { class: "long" }, table([{ title: "patch" }, { title: "state" }, { title: "fired", number: true }, { title: "why" }], patches))));
}
const sourceWords = (sources) => Object.fromEntries(Object.entries(sources || {}).map(([root, state]) => [`sources of ${root}`, state && state.digest ? `${String(state.commit || "no commit").slice(0, 10)}, ${state.files} files, digest ${state.digest}` : state]));
function setupTab() {
  const body = pairs(DATA.run.arguments), input = h("input", { type: "search", placeholder: "Search arguments", "aria-label": "search arguments", oninput: (event) => {
    const text = event.target.value.trim().toLowerCase();
    body.forEach((row) => { row.style.display = row.getAttribute("data-row").includes(text) ? "" : "none"; });
  } });
  const probe = DATA.run.probe || {};
  return h("div", { class: "columns" }, card("Training arguments", `${body.length} of them`, input, table([{ title: "argument" }, { title: "value" }], body)),
    h("div", { class: "stack", css: { "align-content": "start" } }, card("Versions", null, table([{ title: "what" }, { title: "version" }], pairs({ ...DATA.run.versions, ...sourceWords(DATA.run.sources) }), { id: "versions" })),
      card("Environment", "variables that can change what is computed or how ranks communicate", table([{ title: "variable" }, { title: "value" }], pairs(DATA.run.environment), { id: "environment" })),
      card("Layout", null, table([{ title: "axis" }, { title: "size" }], pairs(DATA.run.sizes))),
      card("Probe file", probe.file || null, h("pre", { class: "mono pre", css: { margin: "0" } }, JSON.stringify(probe.content || {}, null, 2))),
      (DATA.run.unseen || []).length ? card("Not observed", "parts of this job that the kit cannot observe", h("ul", null, DATA.run.unseen.map((text) => h("li", null, plain(text))))) : null));
}
