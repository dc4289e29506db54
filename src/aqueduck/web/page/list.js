// A table that stays fast with thousands of rows: only the rows that can be seen are elements.
// A click on a heading sorts it; it filters by text and by state, and does not move while the pointer is over it.

import { h, plural, setAttribute, setText } from "./format.js";

const OVERSCAN = 6;

export class List {
  // options: columns [{name, title, class, value(row), numeric}], states, search(row), noun, make(row) -> element with .update(row)
  constructor(host, options) {
    this.options = options;
    this.rows = new Map();
    this.elements = new Map();
    this.sort = { name: options.sort, down: options.down || false };
    this.text = "";
    this.state = null;
    this.order = [];
    this.build(host);
  }

  build(host) {
    const { columns, noun, label } = this.options;
    this.search = h("input", {
      type: "search", placeholder: `Filter ${noun}s`, "aria-label": `Filter ${noun}s`, spellcheck: "false",
      oninput: () => { this.text = this.search.value.trim().toLowerCase(); this.arrange(true); },
    });
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "Filter by state" });
    this.shown = h("span", { class: "shown", role: "status" });
    this.heads = columns.map((column) => h("div", { role: "columnheader", class: `cell ${column.class || ""}` },
      column.value
        ? h("button", { type: "button", class: "sort", onclick: () => this.sortBy(column) }, column.title)
        : h("span", { class: "unseen" }, column.title)));
    this.body = h("div", { class: "rows", role: "rowgroup" });
    this.head = h("div", { role: "rowgroup", class: "grid-head" }, h("div", { role: "row", class: "row head" }, ...this.heads));
    this.scroller = h("div", { class: "scroller", tabindex: "0", role: "table", "aria-label": label }, this.head, this.body);
    this.empty = h("p", { class: "empty" });
    host.append(h("div", { class: "tools" }, this.search, this.chips, this.shown), this.scroller, this.empty);
    this.scroller.addEventListener("scroll", () => this.paint(), { passive: true });
    new ResizeObserver(() => { this.height = 0; this.paint(); }).observe(this.scroller);
    this.markSort();
  }

  set(key, row) { this.rows.set(key, row); }
  delete(key) { this.rows.delete(key); }
  clear() { this.rows.clear(); }

  sortBy(column) {
    const same = this.sort.name === column.name;
    this.sort = { name: column.name, down: same ? !this.sort.down : Boolean(column.numeric) };
    this.markSort();
    this.arrange(true);
  }

  markSort() {
    this.options.columns.forEach((column, i) => {
      const sorted = column.name === this.sort.name;
      setAttribute(this.heads[i], "aria-sort", sorted ? (this.sort.down ? "descending" : "ascending") : null);
    });
  }

  // A button must not move away while a person is about to press it.
  get busy() {
    return this.scroller.matches(":hover") || (this.body.contains(document.activeElement) && document.activeElement !== this.body);
  }

  refresh() { this.arrange(false); }

  arrange(now) {
    this.paintChips();
    if (now || !this.busy) {
      const column = this.options.columns.find((c) => c.name === this.sort.name);
      const keep = ([, row]) => (!this.state || row.state === this.state) && (!this.text || this.options.search(row).includes(this.text));
      const found = [...this.rows].filter(keep).map(([key, row]) => [key, column.value(row)]);
      const sign = this.sort.down ? -1 : 1;
      found.sort((a, b) => sign * compare(a[1], b[1]) || compare(a[0], b[0]));
      this.order = found.map(([key]) => key);
    } else {
      this.order = this.order.filter((key) => this.rows.has(key));
    }
    if (now) this.scroller.scrollTop = 0;
    this.paint();
  }

  paintChips() {
    const counts = new Map();
    for (const row of this.rows.values()) counts.set(row.state, (counts.get(row.state) || 0) + 1);
    if (this.state && !counts.has(this.state)) counts.set(this.state, 0);
    const states = this.options.states.filter((state) => counts.has(state));
    setAttribute(this.chips, "hidden", states.length < 2 ? "" : null);
    for (const chip of [...this.chips.children]) if (!states.includes(chip.dataset.state)) chip.remove();
    states.forEach((state, i) => {
      let chip = [...this.chips.children].find((c) => c.dataset.state === state);
      if (!chip) {
        chip = h("button", { type: "button", class: "chip", "data-state": state, "aria-pressed": "false", onclick: () => {
          this.state = this.state === state ? null : state;
          this.arrange(true);
        } }, h("span", { class: "chip-name" }, state.toLowerCase()), h("span", { class: "chip-count" }));
      }
      if (this.chips.children[i] !== chip) this.chips.insertBefore(chip, this.chips.children[i] || null);
      setText(chip.lastChild, String(counts.get(state)));
      setAttribute(chip, "aria-pressed", String(this.state === state));
    });
  }

  rowHeight() {
    if (!this.height) this.height = parseFloat(getComputedStyle(this.scroller).getPropertyValue("--row")) || 52;
    return this.height;
  }

  paint() {
    const { noun } = this.options;
    const total = this.rows.size, n = this.order.length, height = this.rowHeight();
    setText(this.shown, n === total ? plural(total, noun) : `${n} of ${plural(total, noun)}`);
    setText(this.empty, n ? "" : total ? `No ${noun} fits the filter.` : `No ${noun} yet.`);
    setAttribute(this.empty, "hidden", n ? "" : null);
    setAttribute(this.scroller, "aria-rowcount", n + 1);
    this.body.style.height = `${n * height}px`;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / height) - OVERSCAN);
    const last = Math.min(n, Math.ceil((this.scroller.scrollTop + (this.scroller.clientHeight || 600)) / height) + OVERSCAN);
    const wanted = new Map();
    for (let i = first; i < last; i++) wanted.set(this.order[i], i);
    for (const [key, element] of this.elements) {
      if (!wanted.has(key) && !(this.rows.has(key) && element.contains(document.activeElement))) {
        element.remove();
        this.elements.delete(key);
      }
    }
    for (const [key, i] of wanted) {
      const row = this.rows.get(key);
      let element = this.elements.get(key);
      if (!element) {
        element = this.options.make(row);
        element.setAttribute("role", "row");
        element.classList.add("row");
        for (const cell of element.children) cell.setAttribute("role", "cell");
        this.elements.set(key, element);
        this.body.append(element);
      }
      if (element.shown !== row || element.stale) { element.update(row); element.shown = row; element.stale = false; }
      setAttribute(element, "aria-rowindex", i + 2);
      element.style.transform = `translateY(${i * height}px)`;
    }
  }

  // Texts such as "3 s ago" grow old without news.
  tick() {
    for (const element of this.elements.values()) element.stale = true;
    this.paint();
  }
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return a < b ? -1 : 1;
}
