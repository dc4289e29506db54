// The page: receives the feed, keeps its state, and has the parts of the page show it.

import { askForToken, toast, token } from "./access.js";
import { follow } from "./feed.js";
import { bytes, count, h, plural, rate, seconds, setAttribute, setText } from "./format.js";
import { Cards, showFacts } from "./groups.js";
import { Lake } from "./lake.js";
import { Problems } from "./problems.js";
import { destinationList, tableList } from "./rows.js";

const POINTS_MAX = 600;
const STATES = ["STREAMING", "LIVE", "CATCHUP", "SNAPSHOT", "SEEDING", "PENDING", "ERRORED"];
const $ = (id) => document.getElementById(id);

const parts = new Map();
const series = new Map();
let mayChange = false;
const may = () => mayChange && Boolean(token.get());

const cards = new Cards($("group-cards"), may);
const tables = tableList($("table-list"), may);
const destinations = destinationList($("destination-list"));
const problems = new Problems($("error-list"));
const lake = new Lake($("lake-panel"));
let link = { state: "connecting", since: null, retryAt: null };

const feed = follow({ update, state: linkChanged });

// -- what comes

function update(data) {
  if (data.full) { parts.clear(); series.clear(); tables.clear(); destinations.clear(); }
  mayChange = data.may_change;
  for (const [key, part] of Object.entries(data.set)) {
    parts.set(key, part);
    if (key.startsWith("table:")) tables.set(key, part);
    if (key.startsWith("destination:")) destinations.set(key, part);
  }
  for (const key of data.gone) { parts.delete(key); tables.delete(key); destinations.delete(key); }
  for (const [name, points] of Object.entries(data.points)) {
    series.set(name, [...(series.get(name) || []), ...points].slice(-POINTS_MAX));
  }
  show(data);
}

function show(data) {
  const head = parts.get("head");
  if (!head) return;
  cards.update(head, series);
  tables.refresh();
  if (destinations.rows.size) destinations.refresh();
  reveal("destinations", destinations.rows.size > 0);
  reveal("tables", tables.rows.size > 0 || !(destinations.rows.size || head.flows.some((flow) => flow.kind === "events")));
  if (parts.get("lake") && (data.set.lake || data.full)) lake.update(parts.get("lake"));
  reveal("lake", Boolean(parts.get("lake")));
  const open = openProblems(head);
  problems.update(open, parts.get("errors") || []);
  setText($("nav-errors"), String(open.length));
  setAttribute($("nav-errors"), "hidden", open.length ? null : "");
  showSummary(head, open);
  showAccess();
  const memory = head.processes.map((p) => `${p.name} ${bytes(p.memory_bytes)}`).join(" · ");
  setText($("about"), `Aqueduck ${head.version}, up ${seconds((Date.parse(head.at) - Date.parse(head.started_at)) / 1000)}${memory ? " · " + memory : ""}`);
}

function openProblems(head) {
  const open = [];
  for (const flow of head.flows) {
    if (flow.error) open.push({ flow: flow.name, ...flow.error });
    for (const group of flow.groups) if (group.error) open.push({ group: group.name, ...group.error });
  }
  for (const row of [...tables.rows.values(), ...destinations.rows.values()]) {
    if (row.error && (row.state.toUpperCase() === "ERRORED" || row.verified.verdict === "different")) open.push(row.error);
  }
  return open;
}

function reveal(id, yes) {
  setAttribute($(id), "hidden", yes ? null : "");
  setAttribute(document.querySelector(`#nav a[href="#${id}"]`), "hidden", yes ? null : "");
}

// -- the summary

function showSummary(head, open) {
  const groups = head.flows.flatMap((flow) => flow.groups);
  const rows = [...tables.rows.values(), ...destinations.rows.values()];
  const [tone, title, text] = verdict(head, groups, open, rows);
  showVerdict(tone, title, text);
  const fresh = groups.filter((group) => group.state === "streaming").map((group) => group.freshness_seconds).filter((s) => s !== null);
  const parked = [...tables.rows.values()].reduce((sum, t) => sum + t.parked_rows, 0);
  showFacts($("figures"), [
    ["Freshness", fresh.length ? seconds(Math.max(...fresh)) : groups.length ? "–" : null],
    ["Throughput", rate(rows.reduce((sum, row) => sum + (row.rate || 0), 0))],
    ["Behind", groups.length ? bytes(groups.reduce((sum, group) => sum + group.lag_bytes, 0)) : null],
    ["Tables", tables.rows.size ? count(tables.rows.size) : null],
    ["Destinations", destinations.rows.size ? count(destinations.rows.size) : null],
    ["Parked", parked ? plural(parked, "change") : null],
  ]);
  showStates($("states"), rows);
}

function showVerdict(tone, title, text) {
  setAttribute($("verdict"), "data-tone", tone);
  setText($("verdict-title"), title);
  setText($("verdict-text"), text);
  document.title = `${tone === "bad" ? "● " : ""}${title} · Aqueduck`;
}

function verdict(head, groups, open, rows) {
  if (head.stalled.length) {
    const [first] = head.stalled;
    return ["bad", "No progress", `${first.reason}, for ${seconds(first.seconds)}`];
  }
  const blind = head.flows.find((flow) => flow.error);
  if (blind) return ["bad", "The source cannot be read", blind.error.message];
  const failed = groups.filter((group) => ["retrying", "errored"].includes(group.state));
  if (failed.length) return ["bad", `${plural(failed.length, "group")} cannot continue`, failed.map((g) => g.name).join(", ")];
  if (open.length) {
    const names = open.map((p) => p.destination || p.table || p.group || p.flow);
    return ["warn", `${plural(open.length, "thing")} need${open.length === 1 ? "s" : ""} attention`,
      `${names.slice(0, 3).join(", ")}${names.length > 3 ? ` and ${names.length - 3} more` : ""}: everything else continues`];
  }
  const seeding = rows.filter((row) => ["seeding", "pending"].includes(row.state));
  if (seeding.length) return ["busy", `Seeding ${plural(seeding.length, "destination")}`, "The others continue meanwhile."];
  const copying = rows.filter((row) => ["SNAPSHOT", "PENDING", "CATCHUP"].includes(row.state));
  if (copying.length) return ["busy", `Copying ${plural(copying.length, "table")}`, "Changes meanwhile are kept and replayed."];
  const stopped = groups.filter((group) => group.state === "disabled");
  if (groups.length && stopped.length === groups.length) return ["idle", "Paused", "The source keeps the changes until it is resumed."];
  if (groups.some((group) => group.state === "starting")) return ["busy", "Starting", "Spark and the streams are on their way."];
  if (groups.length && groups.every((group) => group.delivery)) return ["good", "Everything flows", "Every event is delivered in the order of the commits."];
  if (!rows.length) return ["idle", "Nothing to carry yet", "Add a table: aqueduck tables add public.orders"];
  const text = groups.length ? "Each lake snapshot is a state that the source had." : "Every destination has its rows.";
  return ["good", "Everything flows", text];
}

function showStates(host, rows) {
  const counts = new Map();
  for (const row of rows) counts.set(row.state.toUpperCase(), (counts.get(row.state.toUpperCase()) || 0) + 1);
  const found = STATES.filter((state) => counts.has(state));
  setAttribute(host, "hidden", rows.length ? null : "");
  if (host.dataset.found !== found.join()) {
    host.dataset.found = found.join();
    host.replaceChildren(
      h("div", { class: "states-bar", "aria-hidden": "true" }, ...found.map((state) => h("i", { "data-state": state.toLowerCase() }))),
      h("ul", {}, ...found.map((state) => h("li", { "data-state": state.toLowerCase() }, h("i", { "aria-hidden": "true" }), h("b", {}), " " + state.toLowerCase()))));
  }
  found.forEach((state, i) => {
    host.firstChild.children[i].style.flexGrow = counts.get(state);
    setText(host.lastChild.children[i].querySelector("b"), count(counts.get(state)));
  });
}

// -- the line to the server, and the token

function linkChanged(state, detail) {
  link = { state, ...detail };
  showLink();
  if (state === "refused") wantToken();
}

async function wantToken() {
  if (token.get()) { token.forget(); toast("The token is no longer valid.", "bad"); }
  if (await askForToken("This server shows nothing without its token.")) feed.retry();
}

function showLink() {
  const words = { live: "live", connecting: "connecting", lost: "no connection", refused: "token needed" };
  setAttribute($("live"), "data-state", link.state);
  setText($("live").lastChild, words[link.state]);
  document.body.classList.toggle("offline", link.state === "lost");
  if (link.state === "lost") showVerdict("bad", "No connection", "Below is what was last known.");
  const host = $("banners");
  if (link.state !== "lost" && link.state !== "refused") { host.replaceChildren(); return; }
  if (!host.firstChild) {
    const again = () => (link.state === "refused" ? wantToken() : feed.retry());
    host.append(h("div", { class: "banner", role: "alert" }, h("div", {}, h("strong", {}), h("span", {})),
      h("button", { type: "button", class: "quiet", onclick: again }, "Try now")));
  }
  const [title, text] = host.firstChild.firstChild.children;
  setText(title, link.state === "refused" ? "This server needs a token" : "The service does not answer");
  const left = link.retryAt ? Math.max(0, Math.ceil((link.retryAt - Date.now()) / 1000)) : 0;
  const old = link.since ? `What you see is ${seconds(Math.round((Date.now() - link.since) / 1000)).replace(".0", "")} old. ` : "";
  setText(text, link.state === "refused" ? "" : old + (left ? `Next try in ${left} s.` : "Trying …"));
}

function showAccess() {
  const button = $("unlock");
  setAttribute(button, "hidden", mayChange ? null : "");
  setText(button, token.get() ? "Lock actions" : "Unlock actions");
  document.body.classList.toggle("unlocked", may());
}

$("unlock").addEventListener("click", async () => {
  if (token.get()) { token.forget(); toast("Actions are locked.", "good"); }
  else if (!(await askForToken("With the server's token, tables can be re-copied and groups paused from here."))) return;
  tables.tick();
  show({ set: {} });
});

setInterval(() => { if (link.state === "lost") showLink(); else { tables.tick(); destinations.tick(); problems.tick(); } }, 1000);
