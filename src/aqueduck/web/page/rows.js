// The two lists: tables and destinations, with what a row shows and what it can be asked.

import { act } from "./access.js";
import { ago, bytes, count, h, plural, rate, seconds, setAttribute, setText, until } from "./format.js";
import { List } from "./list.js";

export const TABLE_STATES = ["ERRORED", "SNAPSHOT", "CATCHUP", "PENDING", "STREAMING"];
export const DESTINATION_STATES = ["errored", "seeding", "pending", "live"];

export function pill(state) {
  return h("span", { class: "pill", "data-state": state.toLowerCase() }, state.toLowerCase());
}

function cell(name, ...children) { return h("div", { class: `cell ${name}` }, ...children); }

function labelled(label) {
  const value = h("span", {});
  return [value, h("span", { class: "phone-label" }, label)];
}

function setPill(element, state) {
  setAttribute(element, "data-state", state.toLowerCase());
  setText(element, state.toLowerCase());
}

function tableRow(row, may) {
  const name = h("span", { class: "name" }), target = h("span", { class: "sub" });
  const state = pill(row.state), note = h("span", { class: "sub" });
  const bar = h("progress", { max: "1", "aria-label": "copied" });
  const [speed, speedLabel] = labelled("rate"), [lag, lagLabel] = labelled("lag"), [rows, rowsLabel] = labelled("rows");
  const [last, lastLabel] = labelled("last change");
  const retry = h("button", { type: "button", class: "small", onclick: () => askRetry(element.shown) }, "Retry");
  const resync = h("button", { type: "button", class: "small", onclick: () => askResync(element.shown) }, "Resync");
  const element = h("div", {}, cell("wide", name, target), cell("state", state, bar, note), cell("num rate", speed, speedLabel),
    cell("num", lag, lagLabel), cell("num", rows, rowsLabel), cell("num last", last, lastLabel), cell("actions", retry, resync));
  element.update = (t) => {
    setText(name, t.source);
    setAttribute(name, "title", t.source);
    setText(target, `${t.group} → ${t.target}${t.layout ? `, ${t.layout}` : ""}`);
    setPill(state, t.enabled ? t.state : "disabled");
    const copying = t.state === "SNAPSHOT" && t.copy && t.copy.share !== null;
    setAttribute(bar, "hidden", copying ? null : "");
    if (copying) bar.value = t.copy.share;
    setText(note, tableNote(t));
    setAttribute(note, "title", t.error ? t.error.message : null);
    setText(speed, t.rate ? rate(t.rate) : "–");
    element.classList.toggle("busy", t.rate > 0);
    setText(lag, t.lag_bytes ? bytes(t.lag_bytes) : t.lag_seconds ? seconds(t.lag_seconds) : "–");
    setText(rows, count(t.rows_synced));
    setText(last, t.last_sync_at ? ago(t.last_sync_at) : "–");
    setAttribute(retry, "hidden", may() && t.state === "ERRORED" ? null : "");
    setAttribute(resync, "hidden", may() ? null : "");
    setAttribute(retry, "aria-label", `Retry ${t.source}`);
    setAttribute(resync, "aria-label", `Resync ${t.source}`);
  };
  return element;
}

function tableNote(t) {
  const parked = t.parked_rows ? `${count(t.parked_rows)} parked` : "";
  if (t.state === "SNAPSHOT" && t.copy) {
    const share = t.copy.share === null ? "" : `${Math.floor(t.copy.share * 100)} %`;
    const left = t.copy.seconds_left ? `${seconds(t.copy.seconds_left)} left` : "";
    return [share, left, parked || `${count(t.copy.rows)} rows`].filter(Boolean).join(" · ");
  }
  if (t.state === "ERRORED") {
    const again = t.retry_at ? `retry ${until(t.retry_at)}` : "waits for you";
    return [t.error && t.error.code, again, parked].filter(Boolean).join(" · ");
  }
  if (t.verified.verdict === "different") return verifiedText(t.verified);
  if (t.queued_changes) return `${count(t.queued_changes)} queued`;
  return parked || verifiedText(t.verified);
}

// The result of the last comparison with the source; empty if there was none.
export function verifiedText(v) {
  if (v.verdict === "different") return `differs from its source, found ${ago(v.at)}`;
  const failed = v.failed_at ? `not compared ${ago(v.failed_at)}` : "";
  return failed || (v.verdict === "identical" ? `verified ${ago(v.at)}` : "");
}

function askResync(t) {
  act(`/tables/${encodeURIComponent(t.source)}/resync?group=${encodeURIComponent(t.group)}`, {
    title: `Copy ${t.source} again?`,
    text: "The lake table keeps its rows until the new copy is in. Changes that come meanwhile are kept.",
    yes: "Resync",
  });
}

function askRetry(t) {
  act(`/tables/${encodeURIComponent(t.source)}/retry?group=${encodeURIComponent(t.group)}`, {
    title: `Try ${t.source} again now?`, text: "Say this when the cause of the error is repaired.", yes: "Retry",
  });
}

export function tableList(host, may) {
  return new List(host, {
    noun: "table", label: "Tables", sort: "state", states: TABLE_STATES,
    search: (t) => `${t.source} ${t.target} ${t.group} ${t.error ? t.error.code : ""}`.toLowerCase(),
    make: (row) => tableRow(row, may),
    columns: [
      { name: "source", title: "Table", class: "wide", value: (t) => t.source },
      { name: "state", title: "State", class: "state", value: (t) => TABLE_STATES.indexOf(t.state) },
      { name: "rate", title: "Rate", class: "num rate", value: (t) => t.rate, numeric: true },
      { name: "lag", title: "Lag", class: "num", value: (t) => t.lag_bytes || t.lag_seconds, numeric: true },
      { name: "rows", title: "Rows", class: "num", value: (t) => t.rows_synced, numeric: true },
      { name: "last", title: "Last change", class: "num last", value: (t) => t.last_sync_at || "", numeric: true },
      { name: "actions", title: "Actions", class: "actions" },
    ],
  });
}

function destinationRow(row) {
  const name = h("span", { class: "name" }), flow = h("span", { class: "sub" });
  const state = pill(row.state), note = h("span", { class: "sub" });
  const [speed, speedLabel] = labelled("rate"), [lag, lagLabel] = labelled("behind"), [rows, rowsLabel] = labelled("rows");
  const [last, lastLabel] = labelled("last change");
  const element = h("div", {}, cell("wide", name, flow), cell("state", state, note), cell("num rate", speed, speedLabel),
    cell("num", lag, lagLabel), cell("num", rows, rowsLabel), cell("num last", last, lastLabel));
  element.update = (d) => {
    setText(name, d.name);
    setText(flow, d.position === null ? d.flow : `${d.flow} · snapshot ${d.position}`);
    setPill(state, d.state);
    const again = d.retry_at ? `retry ${until(d.retry_at)}` : "";
    const text = d.state === "errored" ? [d.error && d.error.code, again].filter(Boolean).join(" · ")
      : d.verified.verdict === "different" ? verifiedText(d.verified)
        : d.lag_snapshots ? `${seconds(d.lag_seconds)} behind` : verifiedText(d.verified);
    setText(note, text);
    setAttribute(note, "title", d.error ? d.error.message : null);
    setText(speed, d.rate ? rate(d.rate) : "–");
    element.classList.toggle("busy", d.rate > 0);
    setText(lag, d.lag_snapshots ? count(d.lag_snapshots) : "–");
    setAttribute(lag, "title", d.lag_snapshots ? `${plural(d.lag_snapshots, "lake snapshot")}, ${seconds(d.lag_seconds)}` : null);
    setText(rows, count(d.rows_replicated));
    setText(last, d.last_change_at ? ago(d.last_change_at) : "–");
  };
  return element;
}

export function destinationList(host) {
  return new List(host, {
    noun: "destination", label: "Destinations", sort: "state", states: DESTINATION_STATES,
    search: (d) => `${d.name} ${d.flow} ${d.error ? d.error.code : ""}`.toLowerCase(),
    make: destinationRow,
    columns: [
      { name: "name", title: "Destination", class: "wide", value: (d) => d.name },
      { name: "state", title: "State", class: "state", value: (d) => DESTINATION_STATES.indexOf(d.state) },
      { name: "rate", title: "Rate", class: "num rate", value: (d) => d.rate, numeric: true },
      { name: "lag", title: "Behind", class: "num", value: (d) => d.lag_snapshots, numeric: true },
      { name: "rows", title: "Rows", class: "num", value: (d) => d.rows_replicated, numeric: true },
      { name: "last", title: "Last change", class: "num last", value: (d) => d.last_change_at || "", numeric: true },
    ],
  });
}
