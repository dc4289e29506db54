// A card for each group and each fan-out: its state, three live charts, and the figures behind them.

import { act } from "./access.js";
import { Chart } from "./chart.js";
import { ago, bytes, count, h, plural, rate, seconds, setAttribute, setText } from "./format.js";
import { pill } from "./rows.js";

const GROUP_CHARTS = [
  { title: "Freshness", field: 2, format: seconds, floor: 1, tone: "calm" },
  { title: "Changes", field: 3, format: rate, floor: 10, tone: "deep" },
  { title: "Behind", field: 1, format: bytes, floor: 65536, base: 1024, tone: "warm" },
];
const FLOW_CHARTS = [
  { title: "Oldest change waiting", field: 2, format: seconds, floor: 1, tone: "calm" },
  { title: "Rows", field: 3, format: rate, floor: 10, tone: "deep" },
  { title: "Destinations behind", field: 1, format: count, floor: 5, tone: "warm" },
];

class Card {
  constructor(kind, charts) {
    this.title = h("h3", {});
    this.kind = h("span", { class: "sub" }, kind);
    this.state = pill("starting");
    this.note = h("span", { class: "note" });
    this.charts = charts.map((options) => new Chart(options));
    this.facts = h("dl", { class: "facts" });
    this.problem = h("p", { class: "problem", hidden: true });
    this.buttons = h("div", { class: "card-buttons" });
    this.element = h("article", { class: "card" },
      h("header", {}, this.title, this.state, this.kind, this.note, this.buttons), this.problem,
      h("div", { class: "charts" }, ...this.charts.map((chart) => chart.element)), this.facts);
  }

  show(title, state, note, error, facts, points) {
    setText(this.title, title);
    setAttribute(this.state, "data-state", state);
    setText(this.state, state);
    setText(this.note, note);
    setAttribute(this.problem, "hidden", error ? null : "");
    if (error) setText(this.problem, `${error.code}: ${error.message}${error.hint ? ". Next: " + error.hint : ""}`);
    showFacts(this.facts, facts);
    if (points && points.length) for (const chart of this.charts) chart.update(points);
  }
}

export function showFacts(list, facts) {
  const shown = facts.filter(([, value]) => value !== null);
  if (list.dataset.names !== shown.map(([name]) => name).join()) {
    list.dataset.names = shown.map(([name]) => name).join();
    list.replaceChildren(...shown.map(([name]) => h("div", {}, h("dt", {}, name), h("dd", {}))));
  }
  shown.forEach(([, value], i) => setText(list.children[i].lastChild, value));
}

export class Cards {
  constructor(host, may) {
    this.host = host;
    this.may = may;
    this.cards = new Map();
  }

  update(head, series) {
    const seen = new Set();
    for (const flow of head.flows) {
      for (const group of flow.groups) {
        seen.add(`group:${group.name}`);
        this.group(flow, group, series.get(`group:${group.name}`));
      }
      if (flow.kind === "fanout") {
        seen.add(`flow:${flow.name}`);
        this.flow(flow, series.get(`flow:${flow.name}`));
      }
    }
    for (const [key, card] of this.cards) if (!seen.has(key)) { card.element.remove(); this.cards.delete(key); }
  }

  card(key, kind, charts) {
    let card = this.cards.get(key);
    if (!card) {
      card = new Card(kind, charts);
      this.cards.set(key, card);
      this.host.append(card.element);
    }
    return card;
  }

  group(flow, group, points) {
    const card = this.card(`group:${group.name}`, flow.kind, GROUP_CHARTS);
    if (!card.pause) {
      card.pause = h("button", { type: "button", class: "small", onclick: () => askPause(card.shown) });
      card.buttons.append(card.pause);
    }
    card.shown = group;
    const paused = group.state === "disabled";
    setText(card.pause, paused ? "Resume" : "Pause");
    setAttribute(card.pause, "aria-label", `${paused ? "Resume" : "Pause"} the group ${group.name}`);
    setAttribute(card.pause, "hidden", this.may() ? null : "");
    const sink = group.delivery;
    setText(card.kind, flow.source ? `${flow.kind} from ${flow.source}${sink ? ` to ${sink.sink}` : ""}` : flow.kind);
    const note = group.paused ? `reading waits for the ${sink ? "sink" : "lake"}` : group.held ? "slot let go" : "";
    card.show(group.name, group.state, note, group.error, [
      [sink ? "Bookmark" : "Lake position", group.position || "–"],
      ["Events", sink ? count(sink.events) : null],
      ["Events in all", sink ? count(sink.events_total) : null],
      ["Last commit", ago(group.last_sync_at)],
      ["Batches", count(group.batches)],
      ["Transactions", count(group.transactions)],
      ["Received", bytes(group.received_bytes)],
      ["Staged", bytes(group.staged_bytes)],
      ["WAL kept", group.retained_bytes === null ? null : bytes(group.retained_bytes)],
      ["Verified", flow.kind === "sync" ? verifiedFact(flow.verification) : null],
      ["Restarts", group.restarts ? count(group.restarts) : null],
    ], points);
  }

  flow(flow, points) {
    const card = this.card(`flow:${flow.name}`, flow.kind, FLOW_CHARTS);
    const { counts, seed } = flow;
    setText(card.kind, flow.source ? `${flow.kind} from ${flow.source}` : flow.kind);
    const note = seed ? `seeding ${plural(seed.destinations, "destination")}, ${Math.floor(seed.share * 100)} %` : "";
    card.show(flow.name, flow.error ? "retrying" : "streaming", note, flow.error, [
      ["Source snapshot", flow.source_snapshot === null ? "–" : count(flow.source_snapshot)],
      ["Cycles", count(counts.cycles)],
      ["Reads of the source", count(counts.reads)],
      ["Rows read", count(counts.rows_read)],
      ["Unrouted rows", count(counts.unrouted_rows)],
      ["Without a value", counts.null_rows ? count(counts.null_rows) : null],
      ["Moved", counts.routing_moves ? count(counts.routing_moves) : null],
      ["Verified", verifiedFact(flow.verification)],
      ["Seeded again", counts.reseeds ? count(counts.reseeds) : null],
      ["Miscounted", counts.miscounts ? count(counts.miscounts) : null],
      ["Open sessions", flow.pool ? count(flow.pool.open) : null],
      ["Evicted", flow.pool ? count(flow.pool.evicted) : null],
    ], points);
  }
}

// Everything in one line: what differs, what was never compared, or how old the oldest good verdict is.
function verifiedFact(v) {
  if (!v) return "off";
  if (v.different) return `${count(v.different)} different`;
  if (v.oldest_at) return `identical, ${ago(v.oldest_at)}`;
  return v.identical ? `${count(v.identical)} identical, ${count(v.never)} never` : "never";
}

function askPause(group) {
  const resume = group.state === "disabled";
  act(`/groups/${encodeURIComponent(group.name)}/${resume ? "enable" : "disable"}`, resume ? {
    title: `Resume the group ${group.name}?`, text: "It catches up with everything that WAL holds.", yes: "Resume",
  } : {
    title: `Pause the group ${group.name}?`,
    text: "Its tables are not updated. The source keeps WAL for it until it is resumed: watch the disk there.",
    yes: "Pause", danger: true,
  });
}

