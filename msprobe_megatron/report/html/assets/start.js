// Puts the tabs together. All are built at once, so that searching in the page and printing see everything.
// A run of checks or examined operators alone has no tensors to show a place or a time of: its overview holds the findings.
const TABS = [["overview", "Overview", overviewTab], ...(TENSORS.length ? [["where", "Where", whereTab], ["when", "When", whenTab]] : []), ["who", "Who", whoTab],
  ...(VERSUS ? [["versus", "Compare", versusTab]] : []), ...(TENSORS.length ? [["findings", "Findings", findingsTab]] : []), ["log", "Log", logTab], ["setup", "Setup", setupTab]];

function show(id) {
  for (const [name] of TABS) {
    document.getElementById(`tab-${name}`).classList.toggle("on", name === id);
    document.getElementById(`button-${name}`).setAttribute("aria-selected", String(name === id));
  }
  window.scrollTo(0, 0);
  redraws.forEach((draw) => draw());
}
function setTheme(theme, keep) {
  document.documentElement.setAttribute("data-theme", theme);
  if (keep) try { localStorage.setItem("msprobe-theme", theme); } catch { /* pages from a file may have no storage */ }
  redraws.forEach((draw) => draw());
}
function start() {
  let theme = null;
  try { theme = localStorage.getItem("msprobe-theme"); } catch { /* as above */ }
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(theme || (system.matches ? "dark" : "light"), false);
  const toggle = () => setTheme(document.documentElement.getAttribute("data-theme") === "dark" ? "light" : "dark", true);
  document.title = `${DATA.verdict.headline} – ${DATA.run.path}`;
  document.getElementById("app").append(
    h("header", { class: "top" }, h("span", { class: "brand" }, "msprobe_megatron"), h("span", { class: "where mono", title: DATA.run.path }, DATA.run.path),
      h("nav", { role: "tablist" }, TABS.map(([id, title]) => h("button", { id: `button-${id}`, type: "button", role: "tab", "aria-selected": "false", "aria-controls": `tab-${id}`, onclick: () => show(id) }, title))),
      h("button", { class: "theme", type: "button", id: "theme", "aria-label": "light or dark", title: "light or dark", onclick: toggle }, "◐")),
    h("main", null, TABS.map(([id, title, build]) => h("section", { class: "tab", id: `tab-${id}`, role: "tabpanel", "aria-labelledby": `button-${id}` }, h("h2", { class: "print" }, title), build())),
      DATA.notes.length ? h("p", { class: "notes" }, DATA.notes.join(" ")) : null));
  show("overview");
  window.addEventListener("resize", () => redraws.forEach((draw) => draw()));
  // Hidden tabs are visible on paper: their canvases get a size just before.
  let shown = "light";
  // Paper is white: dark colours would be pale on it.
  window.addEventListener("beforeprint", () => { shown = document.documentElement.getAttribute("data-theme"); setTheme("light", false); document.querySelectorAll("section.tab").forEach((tab) => tab.classList.add("on")); redraws.forEach((draw) => draw()); });
  window.addEventListener("afterprint", () => { setTheme(shown, false); const open = document.querySelector('nav [aria-selected="true"]'); show(open.id.replace("button-", "")); });
  document.documentElement.setAttribute("data-ready", "true");
}
start();
