// What is wrong now, with the next step, and what was wrong lately.

import { ago, h, plural, setAttribute } from "./format.js";

const SHOWN = 20;
const NAMES = 4;

export class Problems {
  constructor(host) {
    this.host = host;
    this.all = false;
    this.before = "";
  }

  // open: problems of tables, groups and destinations that last; recent: the history of the service.
  update(open, recent) {
    const state = JSON.stringify([open, recent, this.all]);
    if (state === this.before) return this.tick();
    this.before = state;
    const lasting = new Set(open.map((problem) => key(problem)));
    const past = recent.filter((problem) => !lasting.has(key(problem)));
    const now = together(open);
    const shown = this.all ? past : past.slice(0, Math.max(3, SHOWN - now.length));
    const parts = [];
    if (!open.length && !past.length) parts.push(h("p", { class: "panel empty" }, "No errors. Nothing to do."));
    if (now.length) parts.push(h("ul", { class: "problems" }, ...now.slice(0, this.all ? 500 : SHOWN).map((p) => item(p, true))));
    if (shown.length) parts.push(h("h3", { class: "past-title" }, "Earlier"), h("ul", { class: "problems past" }, ...shown.map((p) => item(p, false))));
    const hidden = past.length - shown.length + Math.max(0, now.length - (this.all ? 500 : SHOWN));
    if (hidden > 0 && !this.all) {
      parts.push(h("button", { type: "button", class: "quiet", onclick: () => { this.all = true; this.update(open, recent); } },
        `Show ${plural(hidden, "more error", "more errors")}`));
    }
    this.host.replaceChildren(...parts);
    this.tick();
  }

  tick() {
    for (const time of this.host.querySelectorAll("time")) time.textContent = ago(time.dateTime);
  }
}

function key(p) { return [p.code, p.group, p.table, p.destination, p.message].join("|"); }

// The same error of many tables or destinations is one thing to read.
function together(open) {
  const found = new Map();
  for (const p of open) {
    const same = [p.code, p.message, p.hint].join("|");
    if (found.has(same)) found.get(same).about.push(name(p));
    else found.set(same, { ...p, about: [name(p)] });
  }
  return [...found.values()];
}

function name(p) { return p.destination || p.table || p.group || p.flow || ""; }

function item(p, open) {
  const names = p.about || [name(p)];
  const about = names.slice(0, NAMES).join(", ") + (names.length > NAMES ? ` and ${names.length - NAMES} more` : "");
  const hint = p.hint && h("p", { class: "hint" }, h("span", {}, "Next"), h("code", {}, p.hint), copyButton(p.hint));
  return h("li", { class: open ? "open" : null },
    h("div", { class: "problem-top" }, h("code", { class: "code" }, p.code), h("strong", {}, about), names.length === 1 && p.group && p.group !== about && h("span", { class: "sub" }, p.group), p.at && h("time", { datetime: p.at })),
    h("p", {}, p.message), hint);
}

function copyButton(text) {
  const button = h("button", { type: "button", class: "small copy", onclick: async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Select it"; }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  } }, "Copy");
  setAttribute(button, "aria-label", "Copy the next step");
  return button;
}
