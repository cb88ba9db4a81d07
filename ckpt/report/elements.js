
"use strict";

// Elements and texts. Nothing of the data becomes markup: texts are set as text, after `shown`.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

/** Write characters that show nothing, or turn text around, as escapes. */
function shown(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Cs}\u2028\u2029]/gu,
    (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : shown(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null) made.append(child instanceof Node ? child : shown(child));
  }
  return made;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return unit === "B" ? `${bytes} B` : `${bytes.toFixed(2)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(2)} TiB`;
}

function count(number, noun) {
  const digits = number.toLocaleString("en-US");
  return noun === undefined ? digits : `${digits} ${noun}${number === 1 ? "" : "s"}`;
}

function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 100) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const at = units.findIndex(([, length]) => s >= length);
  const [large, small] = [units[at], units[at + 1]];
  if (small === undefined) return `${Math.round(s)} s`;
  const whole = Math.floor(s / large[1]), rest = Math.round((s - whole * large[1]) / small[1]);
  return rest * small[1] >= large[1] ? `${whole + 1} ${large[0]}` : rest ? `${whole} ${large[0]} ${rest} ${small[0]}` : `${whole} ${large[0]}`;
}

/** Write a metric with four digits. */
function metric(value) {
  return value === null || value === undefined ? "" : String(Number(value.toPrecision(4)));
}

function percent(part, whole) {
  const share = whole ? 100 * part / whole : 0;
  return `${share === 0 || share >= 10 ? share.toFixed(0) : share.toPrecision(2)} %`;
}

function moment(s) {
  return s === null ? "–" : new Date(1000 * s).toISOString().replace("T", " ").slice(0, 19);
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[(sorted.length - 1) >> 1] : null;
}

/** Make a table. A column is `[title, kind]`; kind: undefined, "right" or "wrap". Cells are texts, or `[text, value]`. A column of empty cells is left out. */
function table(caption, columns, rows) {
  const textOf = (cell) => (Array.isArray(cell) ? cell[0] : cell);
  const filled = columns.map((_, at) => at).filter((at) => !at || rows.some((row) => textOf(row[at]) !== ""));
  const cells = (row) => filled.map((at) => {
    const [text, value] = Array.isArray(row[at]) ? row[at] : [row[at], null];
    const made = { class: columns[at][1] ?? null, "data-value": value };
    return at ? el("td", made, text) : el("th", { ...made, scope: "row", title: text }, text);
  });
  const head = filled.map((at) => columns[at]).map(([title, kind]) => el("th", { scope: "col", class: kind ?? null }, title));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, el("tr", {}, head)),
      el("tbody", {}, rows.map((row) => el("tr", {}, cells(row))))));
}

/** Fold a table away; it is made when it is opened first. */
function folded(title, make) {
  const made = el("details", {}, el("summary", {}, title));
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) made.append(make());
  });
  return made;
}

/** Offer choices, of which one is on. */
function choices(name, options, chosen, choose) {
  return options.map(([value, title]) => el("label", {}, el("input", {
    type: "radio", name, value, checked: value === chosen, onchange: () => choose(value),
  }), title));
}

function control(title, name, options, chosen, choose) {
  return el("div", { class: "control", role: "radiogroup", "aria-label": title }, el("span", {}, title),
    el("div", { class: "segments" }, choices(name, options, chosen, choose)));
}
