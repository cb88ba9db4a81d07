
// What is in the checkpoint: squares by size, which open.

const COLOURS = 10, MOST_TILES = 120, HEAD = 22, GAP = 2;

/** Make a module of its children, with the sums of what is below. */
function moduleOf(name, children) {
  const sums = { bytes: 0, referred: 0, count: 0 };
  for (const child of children) for (const key of Object.keys(sums)) sums[key] += child[key];
  return { name, children, ...sums };
}

function nodeOf(stored) {
  const [name, part, dtype, bytes, referred, number, shape, sharding] = stored;
  if (Array.isArray(part)) return moduleOf(name, part.map(nodeOf));
  return { name, part, dtype, bytes, referred, count: number, shape, sharding, children: null };
}

/** Keep the leaves that pass a test; null if none does. */
function kept(node, test) {
  if (node.children === null) return test(node) ? node : null;
  const children = node.children.map((child) => kept(child, test)).filter((child) => child !== null);
  return children.length ? moduleOf(node.name, children) : null;
}

/** Join modules that have one child only with it. */
function joined(node) {
  if (node.children === null) return node;
  const children = node.children.map(joined);
  if (children.length === 1 && node.name !== "" && children[0].children !== null) {
    return { ...children[0], name: `${node.name}.${children[0].name}` };
  }
  return { ...node, children };
}

function leavesOf(node) {
  return node.children === null ? [node] : node.children.flatMap(leavesOf);
}

/** Lay out areas as squarely as it goes (Bruls, Huizing, van Wijk); `nodes` are the largest first. */
function squarified(nodes, x, y, width, height) {
  const total = nodes.reduce((sum, node) => sum + node.bytes, 0), scale = total ? width * height / total : 0;
  const placed = [];
  let at = 0;
  while (at < nodes.length && width > 0 && height > 0) {
    const side = Math.min(width, height);
    let sum = 0, end = at, worst = Infinity;
    while (end < nodes.length) {
      const grown = sum + nodes[end].bytes * scale, thick = grown / side;
      const ratio = Math.max(nodes[at].bytes * scale / thick / thick, thick * thick / (nodes[end].bytes * scale));
      if (ratio > worst) break;
      [sum, worst] = [grown, ratio];
      end += 1;
    }
    const thick = sum / side;
    let along = 0;
    for (const node of nodes.slice(at, end)) {
      const long = node.bytes * scale / thick;
      placed.push(width <= height ? { node, x: x + along, y, w: long, h: thick } : { node, x, y: y + along, w: thick, h: long });
      along += long;
    }
    if (width <= height) [y, height] = [y + thick, height - thick];
    else [x, width] = [x + thick, width - thick];
    at = end;
  }
  return placed;
}

/** Lay out numbered modules, such as layers, in rows and in their order; others as squarely as it goes. */
function arranged(nodes, x, y, width, height) {
  if (nodes.length < 3 || width <= 0 || height <= 0 || !nodes.every((node) => /^\d+(\.|$)/.test(node.name))) {
    return squarified(nodes, x, y, width, height);
  }
  const inOrder = [...nodes].sort((a, b) => parseInt(a.name, 10) - parseInt(b.name, 10));
  const sum = (some) => some.reduce((bytes, node) => bytes + node.bytes, 0);
  const rows = Math.min(nodes.length, Math.max(1, Math.round(Math.sqrt(nodes.length * height / width)))), each = Math.ceil(nodes.length / rows);
  const placed = [];
  for (let at = 0; at < inOrder.length; at += each) {
    const row = inOrder.slice(at, at + each), h = height * sum(row) / sum(nodes);
    let along = x;
    for (const node of row) {
      const w = width * node.bytes / sum(row);
      placed.push({ node, x: along, y, w, h });
      along += w;
    }
    y += h;
  }
  return placed;
}

class Treemap {
  constructor(facts) {
    this.facts = facts;
    this.whole = nodeOf(facts.tree);
    this.dtypes = [...new Set(leavesOf(this.whole).map((leaf) => leaf.dtype))];
    const bytesOf = (dtype) => leavesOf(this.whole).reduce((sum, leaf) => sum + (leaf.dtype === dtype ? leaf.bytes : 0), 0);
    this.dtypes = this.dtypes.map((dtype) => [bytesOf(dtype), dtype]).sort((a, b) => b[0] - a[0]).map(([, dtype]) => dtype);
    this.colour = "part";
    this.grouped("name");
    this.map = el("div", { class: "map", role: "group", onkeydown: (event) => this.key(event),
      "aria-label": "Treemap. Arrow keys move, Enter opens, Escape goes back." });
    this.crumbs = el("ol", { class: "crumbs" });
    this.detail = el("p", { class: "detail", "aria-live": "polite" });
    this.legend = el("ul", { class: "legend", "data-value": "legend" });
    this.table = el("div");
    new ResizeObserver(() => this.place()).observe(this.map);
  }

  /** The kinds that colours stand for, and that of a leaf. */
  get kinds() {
    if (this.colour === "dtype") return this.dtypes;
    return this.colour === "part" ? this.facts.parts : ["own", "in other checkpoints"];
  }

  kindOf(leaf) {
    if (this.colour === "dtype") return this.dtypes.indexOf(leaf.dtype);
    return this.colour === "part" ? leaf.part : Number(leaf.referred > 0);
  }

  colourOf(leaf) {
    const kind = this.kindOf(leaf);
    return `k${this.colour === "origin" && kind ? 3 : Math.min(kind, COLOURS - 1)}`;
  }

  /** Arrange everything by module, part or dtype first. */
  grouped(by) {
    let root = this.whole;
    if (by === "part") {
      root = moduleOf("", this.facts.parts.map((name, part) => [name, kept(this.whole, (leaf) => leaf.part === part)])
        .filter(([, tree]) => tree).map(([name, tree]) => ({ ...tree, name })));
    } else if (by === "dtype") {
      root = moduleOf("", this.dtypes.map((dtype) => ({ ...kept(this.whole, (leaf) => leaf.dtype === dtype), name: dtype })));
    }
    this.path = [{ ...joined(root), name: "everything" }];
  }

  element() {
    const colours = [["part", "part"], ["dtype", "dtype"]];
    if (this.facts.referred_bytes) colours.push(["origin", "own or referred"]);
    const groups = [["name", "module"], ["part", "part"], ["dtype", "dtype"]];
    return [el("div", { class: "row" },
      control("Group by", "group", groups, "name", (by) => { this.grouped(by); this.show(); }),
      control("Colour by", "colour", colours, "part", (by) => { this.colour = by; this.show(); })),
    el("nav", { "aria-label": "Modules" }, this.crumbs), this.map, this.detail, this.legend, this.table];
  }

  /** Draw the module that is open. */
  show(focus = false) {
    const node = this.path.at(-1);
    this.crumbs.replaceChildren(...this.path.map((each, at) => el("li", {}, at === this.path.length - 1
      ? el("span", { "aria-current": "page" }, each.name)
      : el("button", { type: "button", onclick: () => this.up(at) }, each.name))));
    const leaves = leavesOf(node);
    this.legend.replaceChildren(...this.kinds.map((kind, at) => {
      const mine = leaves.filter((leaf) => this.kindOf(leaf) === at);
      if (!mine.length) return null;
      const refers = this.colour === "origin" && at === 1, bytes = refers ? node.referred : mine.reduce((sum, leaf) => sum + leaf.bytes, 0);
      return el("li", { "data-kind": kind, "data-value": bytes }, el("i", { class: this.colourOf(mine[0]), "aria-hidden": "true" }),
        `${kind} `, el("b", {}, size(bytes)), refers ? " as stored" : ` ${percent(bytes, node.bytes)}`);
    }).filter((item) => item !== null));
    const open = this.table.firstChild?.open;
    this.table.replaceChildren(folded("As a table", () => this.rows(node)));
    this.table.firstChild.open = Boolean(open);
    this.place();
    this.tell(node);
    if (focus) (this.map.querySelector('[tabindex="0"]') ?? this.map).focus();
  }

  place() {
    const node = this.path.at(-1), width = this.map.clientWidth;
    if (!width) return;
    const height = Math.round(Math.max(300, Math.min(540, width * (width < 620 ? 1.05 : 0.5))));
    this.map.style.height = `${height}px`;
    const opened = node.children ?? [node];
    let nodes = opened.filter((child) => child.bytes > 0).sort((a, b) => b.bytes - a.bytes);
    if (nodes.length > MOST_TILES) {
      const rest = nodes.slice(MOST_TILES - 1);
      nodes = [...nodes.slice(0, MOST_TILES - 1), moduleOf(`${count(rest.length)} smaller`, rest)];
      nodes.sort((a, b) => b.bytes - a.bytes);
    }
    const chosen = [...this.map.children].indexOf(document.activeElement);
    this.map.replaceChildren(...arranged(nodes, 0, 0, width, height).map((box) => this.tile(box, node)));
    const first = this.map.children[Math.max(0, chosen)] ?? this.map.firstChild;
    if (first) {
      first.tabIndex = 0;
      if (chosen >= 0) first.focus();
    }
  }

  tile({ node, x, y, w, h }, parent) {
    const opens = node.children !== null;
    const holds = opens ? `, ${count(node.count)} ${node.count === 1 ? "entry" : "entries"}, opens` : "";
    const words = `${node.name}, ${size(node.bytes)}, ${percent(node.bytes, parent.bytes)}${holds}`;
    const made = el("button", { type: "button", class: `tile ${opens ? "module" : `leaf ${this.colourOf(node)}`}`, tabindex: "-1", "data-name": node.name,
      onclick: () => (opens ? this.down(node) : this.tell(node)), onfocus: () => this.tell(node), onmouseenter: () => this.tell(node) },
    el("span", { class: "hidden" }, words));
    boxed(made, x + GAP / 2, y + GAP / 2, w - GAP, h - GAP);
    const titled = w > 34 && h > 20, nested = opens && w > 16 && h > 8 && (!titled || h > HEAD + 18);
    if (titled) {
      const bytes = el("span", { class: "size", "aria-hidden": "true" }, size(node.bytes));
      if (opens) made.append(el("span", { class: "name", "aria-hidden": "true" }, node.name, w > 130 ? bytes : null));
      else made.append(el("span", { class: "name", "aria-hidden": "true" }, node.name), ...(h > 38 ? [bytes] : []));
    }
    if (nested) this.nest(made, node, 3, titled ? HEAD : 3, w - GAP - 6, h - GAP, 0);
    return made;
  }

  /** Draw what is inside of a module, as far as there is room. */
  nest(into, node, x, y, width, bottom, depth) {
    const height = bottom - y - 3;
    if (width < 6 || height < 6) return;
    const inside = node.children.filter((child) => child.bytes > 0).sort((a, b) => b.bytes - a.bytes).slice(0, MOST_TILES);
    for (const box of arranged(inside, x, y, width, height)) {
      const [w, h] = [box.w - 1.5, box.h - 1.5];
      if (w < 1.5 || h < 1.5) continue;
      const opens = box.node.children !== null, deeper = opens && depth < 3 && w > 44 && h > 40;
      const leaf = opens ? leavesOf(box.node).reduce((a, b) => (b.bytes > a.bytes ? b : a)) : box.node;
      const made = el("span", { class: `inner ${deeper ? "module" : this.colourOf(leaf)}`, "aria-hidden": "true" }, w > 34 && h > 17 ? box.node.name : "");
      boxed(made, box.x, box.y, w, h);
      if (w <= 34 || h <= 17) made.style.padding = "0";
      into.append(made);
      if (deeper) this.nest(into, box.node, box.x + 2, box.y + 18, w - 4, box.y + h, depth + 1);
    }
  }

  tell(node) {
    const at = this.path.indexOf(node), names = this.path.slice(1, at < 0 ? undefined : at + 1).map((each) => each.name);
    const name = at < 0 ? [...names, node.name].join(".") : names.join(".") || "everything";
    const facts = node.children === null && node.shape ? [`${node.dtype} ${node.shape}`, node.sharding] : [node.children === null && node.count === 1 ? node.dtype : `${count(node.count)} entries`];
    if (node.referred) facts.push(`${size(node.referred)} of it in other checkpoints`);
    this.detail.replaceChildren(el("strong", {}, name), ` · ${size(node.bytes)}`,
      ` · ${percent(node.bytes, this.path[0].bytes)} of everything · ${shown(facts.filter(Boolean).join(" · "))}`);
  }

  rows(node) {
    const nodes = (node.children ?? [node]).slice().sort((a, b) => b.bytes - a.bytes);
    const parts = (each) => [...new Set(leavesOf(each).map((leaf) => this.facts.parts[leaf.part]))].join(", ");
    const kinds = (each) => (each.children === null ? `${each.dtype} ${each.shape ?? ""}` : [...new Set(leavesOf(each).map((leaf) => leaf.dtype))].slice(0, 6).join(", "));
    const columns = [["name"], ["size", "right"], ["share", "right"], ["in other checkpoints", "right"], ["entries", "right"], ["part"], ["content"], ["sharding"]];
    return table(`What is in ${node.name}`, columns, nodes.slice(0, 1000).map((each) => [each.name, [size(each.bytes), each.bytes],
      percent(each.bytes, node.bytes), [each.referred ? size(each.referred) : "", each.referred], count(each.count), parts(each), kinds(each), each.sharding ?? ""]));
  }

  down(node) {
    this.path.push(node);
    this.show(true);
  }

  up(at) {
    this.path.length = Math.max(1, at + 1);
    this.show(true);
  }

  key(event) {
    const tiles = [...this.map.children], from = tiles.indexOf(document.activeElement);
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    let to = null;
    if (event.key === "Escape" || event.key === "Backspace") {
      if (this.path.length > 1) this.up(this.path.length - 2);
    } else if (event.key === "Home") [to] = tiles;
    else if (event.key === "End") to = tiles.at(-1);
    else if (ways[event.key] && from >= 0) to = nearest(tiles, tiles[from], ways[event.key]);
    else return;
    event.preventDefault();
    if (to) {
      for (const tile of tiles) tile.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    }
  }
}

function boxed(made, x, y, w, h) {
  const px = (length) => `${Math.max(0, length).toFixed(1)}px`;
  Object.assign(made.style, { left: px(x), top: px(y), width: px(w), height: px(h) });
}

/** Find the tile next to one in a direction; null at the edge. */
function nearest(tiles, from, [dx, dy]) {
  const middle = (tile) => [tile.offsetLeft + tile.offsetWidth / 2, tile.offsetTop + tile.offsetHeight / 2];
  const [x, y] = middle(from);
  let best = null, least = Infinity;
  for (const tile of tiles) {
    const [tx, ty] = middle(tile), along = dx * (tx - x) + dy * (ty - y), across = Math.abs(dx ? ty - y : tx - x);
    if (tile !== from && along > 1 && along + 2 * across < least) [best, least] = [tile, along + 2 * across];
  }
  return best;
}
