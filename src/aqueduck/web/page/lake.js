// The state of the lake: files, sizes, lake snapshots; what needs maintenance is visible at a glance.

import { ago, bytes, count, h, plural } from "./format.js";
import { showFacts } from "./groups.js";

const SHOWN = 12;
const SMALL_BYTES = 4 << 20;
const MANY_FILES = 50;

export class Lake {
  constructor(host) {
    this.facts = h("dl", { class: "facts wide-facts" });
    this.bars = h("div", { class: "bars", role: "list", "aria-label": "Lake tables by size" });
    this.more = h("button", { type: "button", class: "quiet", onclick: () => { this.all = true; this.update(this.lake); } });
    host.append(this.facts, this.bars, this.more);
  }

  update(lake) {
    this.lake = lake;
    const tables = [...lake.tables].sort((a, b) => b.bytes - a.bytes || (a.name < b.name ? -1 : 1));
    const sum = (field) => tables.reduce((total, table) => total + (table[field] || 0), 0);
    showFacts(this.facts, [
      ["Size", bytes(sum("bytes") + sum("delete_bytes"))],
      ["Files", count(sum("files"))],
      ["Delete files", count(sum("delete_files"))],
      ["Inlined rows", count(sum("inlined_rows"))],
      ["Lake snapshots", count(lake.snapshots)],
      ["Newest", lake.snapshot_id === null ? "–" : `#${lake.snapshot_id}`],
      ["Oldest", lake.oldest_snapshot_at ? ago(lake.oldest_snapshot_at) : null],
      ["Catalog", lake.catalog],
    ]);
    const most = Math.max(1, ...tables.map((table) => table.bytes));
    const shown = this.all ? tables : tables.slice(0, SHOWN);
    this.bars.replaceChildren(...shown.map((table) => bar(table, most)));
    this.more.hidden = shown.length === tables.length;
    this.more.textContent = `Show all ${plural(tables.length, "lake table")}`;
  }
}

function bar(table, most) {
  const fill = h("span", { class: "bar-fill" });
  fill.style.width = `${Math.max(0.5, (table.bytes / most) * 100)}%`;
  const small = table.files >= MANY_FILES && table.bytes / table.files < SMALL_BYTES;
  const notes = [plural(table.files, "file"), table.delete_files ? plural(table.delete_files, "delete file") : "",
    table.inlined_rows ? `${plural(table.inlined_rows, "row")} inlined` : ""].filter(Boolean).join(" · ");
  return h("div", { class: "bar", role: "listitem" }, h("span", { class: "name" }, table.name), h("span", { class: "bar-track", "aria-hidden": "true" }, fill),
    h("span", { class: "bar-size" }, bytes(table.bytes)), h("span", { class: "sub" }, notes, small ? h("em", {}, " · many small files") : null));
}
