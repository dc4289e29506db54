// Figures and times as people read them, and the one helper that makes elements.

const numbers = new Intl.NumberFormat("en");

export function count(n) {
  if (n === null || n === undefined) return "–";
  if (Math.abs(n) < 1e5) return numbers.format(Math.round(n));
  return scaled(n, 1000, ["", "k", "M", "G", "T"], "");
}

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  return scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], " ");
}

export function rate(n) {
  if (!n) return "0/s";
  return (n < 10 ? n.toFixed(1) : count(n)) + "/s";
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.01) return "0 s";
  if (s < 10) return s.toFixed(s < 1 ? 2 : 1) + " s";
  if (s < 120) return Math.round(s) + " s";
  if (s < 7200) return Math.floor(s / 60) + " min";
  if (s < 172800) return Math.floor(s / 3600) + " h";
  return Math.floor(s / 86400) + " d";
}

export function ago(iso, now = Date.now()) {
  if (!iso) return "never";
  const s = (now - Date.parse(iso)) / 1000;
  return s < 2 ? "now" : seconds(s < 10 ? Math.round(s) : s).replace(".0", "") + " ago";
}

export function until(iso, now = Date.now()) {
  const s = (Date.parse(iso) - now) / 1000;
  return s <= 1 ? "now" : "in " + seconds(Math.round(s)).replace(".0", "");
}

export function plural(n, word, words = word + "s") {
  return `${count(n)} ${n === 1 ? word : words}`;
}

function scaled(n, base, units, space) {
  let i = 0;
  while (Math.abs(n) >= base && i < units.length - 1) { n /= base; i++; }
  const digits = i === 0 || n >= 100 ? 0 : n >= 10 ? 1 : 2;
  return n.toFixed(digits) + space + units[i];
}

// h("button", {class: "quiet", onclick: f}, "Resync"): text is always text, never HTML.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Change only what is different: a screen reader and a selection stay where they are.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}
