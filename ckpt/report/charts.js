
// Charts, drawn again for each width, so that their texts keep their size.

/** Make a picture that is drawn for the width it has. */
function chart(label, paint) {
  const made = draw("svg", { role: "img", "aria-label": label });
  new ResizeObserver(() => {
    const width = made.clientWidth;
    if (!width || made.dataset.width === String(width)) return;
    made.dataset.width = width;
    const [height, parts] = paint(width);
    made.setAttribute("viewBox", `0 0 ${width} ${height}`);
    made.setAttribute("height", height);
    made.replaceChildren(...parts.flat(3).filter((part) => part));
  }).observe(made);
  return made;
}

/** Steps between the marks of an axis. */
const STEPS = {
  counts: Array.from({ length: 48 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3)),
  bytes: Array.from({ length: 60 }, (_, at) => 2 ** at),
  seconds: [...[1e-3, 1e-2, 1e-1, 1].flatMap((power) => [power, 2 * power, 5 * power]), 10, 20, 30,
    ...[60, 3600].flatMap((unit) => [1, 2, 5, 10, 20, 30].map((times) => times * unit)).filter((s) => s < 36000),
    ...[6, 12].map((hours) => 3600 * hours), ...Array.from({ length: 10 }, (_, at) => 86400 * 2 ** at)],
};

/** Choose round marks from 0 to the largest value, at most five of them. */
function marks(largest, kind) {
  const step = STEPS[kind].find((each) => largest / each <= 4) ?? largest;
  return Array.from({ length: Math.floor(largest / step + 1e-9) + 1 }, (_, at) => at * step);
}

const LEFT = 74, RIGHT = 8;

function grid(largest, kind, write, width, top, height) {
  return marks(largest, kind).map((mark) => {
    const y = top + height * (1 - mark / largest);
    return [draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
      draw("text", { class: "axis", x: LEFT - 8, y: y + 4, "text-anchor": "end" }, write(mark))];
  });
}

/** Draw a bar for each value, or for the largest of several where they are many. `shades` are stacked upon `values`. */
function bars(label, values, { kind, write, name, high = 150, marked = () => false, shades = null }) {
  return chart(label, (width) => {
    const room = width - LEFT - RIGHT, each = Math.max(1, Math.ceil(values.length / Math.max(1, Math.floor(room / 3))));
    const groups = Array.from({ length: Math.ceil(values.length / each) }, (_, at) => {
      const from = at * each, slice = values.slice(from, from + each);
      const best = from + slice.reduce((most, value, i) => ((value ?? 0) > (slice[most] ?? 0) ? i : most), 0);
      return { best, marked: slice.some((_value, i) => marked(from + i)) };
    });
    const top = 8, total = (at) => (values[at] ?? 0) + (shades?.[at] ?? 0), largest = Math.max(...groups.map((g) => total(g.best)), kind === "seconds" ? 1e-3 : 1);
    const wide = room / groups.length, thin = Math.min(72, Math.max(1, wide - (wide > 6 ? 2 : wide > 3 ? 1 : 0.3)));
    const tall = (value) => high * value / largest;
    const drawn = groups.map((group, at) => {
      const own = tall(values[group.best] ?? 0), more = tall(shades?.[group.best] ?? 0), x = LEFT + (at + 0.5) * wide - thin / 2;
      const made = draw("g", {}, draw("title", {}, `${name(group.best)}: ${write(total(group.best))}`),
        draw("rect", { class: group.marked ? "mark" : "bar", x, width: thin, y: top + high - own, height: Math.max(own, total(group.best) ? 1 : 0), rx: thin > 8 ? 2 : 0 }));
      if (more) made.append(draw("rect", { class: "soft", x, width: thin, y: top + high - own - more, height: more }));
      return made;
    });
    const last = values.length - 1, middle = (index) => LEFT + (Math.floor(index / each) + 0.5) * wide;
    const labels = wide > 64 ? values.map((_, at) => at) : [...new Set([0, Math.round(last / 2), last])];
    const anchor = (index) => (wide > 64 || (index > 0 && index < last) ? "middle" : index ? "end" : "start");
    const texts = labels.map((index) => draw("text", { class: "axis", y: top + high + 16, "text-anchor": anchor(index),
      x: middle(index) + { start: -thin / 2, middle: 0, end: thin / 2 }[anchor(index)] }, clipped(name(index), wide > 64 ? wide / 7 : 20)));
    return [top + high + 24, [grid(largest, kind, write, width, top, high), drawn, texts]];
  });
}

/** Cut a text that is longer than there is room. */
function clipped(text, most) {
  return text.length <= most ? text : `${text.slice(0, Math.max(1, most - 1))}…`;
}

/** Draw spans one below the other on one axis of time. A row is `[name, [[begin, end, class, title], ...]]`. */
function spans(label, rows) {
  const end_s = Math.max(...rows.flatMap(([, parts]) => parts.map(([, end]) => end)), 1e-3);
  return chart(label, (width) => {
    const left = width < 520 ? 92 : 150, room = width - left - 16, high = 26, x = (s) => left + room * s / end_s;
    const axis = marks(end_s, "seconds").map((mark) => [draw("line", { class: "grid", x1: x(mark), x2: x(mark), y1: 4, y2: rows.length * (high + 6) + 6 }),
      draw("text", { class: "axis", x: x(mark), y: rows.length * (high + 6) + 22, "text-anchor": mark ? "middle" : "start" }, seconds(mark))]);
    const drawn = rows.map(([name, parts], row) => {
      const y = 6 + row * (high + 6);
      return [draw("text", { x: 0, y: y + 17, class: row ? null : "strong" }, name), parts.map(([begin, end, kind, title]) => {
        const wide = Math.max(1.5, x(end) - x(begin)), words = `${title} ${seconds(end - begin)}`;
        const text = wide > 7.2 * words.length ? words : wide > 7.2 * title.length + 8 ? title : "";
        return draw("g", {}, draw("title", {}, words), draw("rect", { class: kind, x: x(begin), y, width: wide, height: high, rx: 3 }),
          text ? draw("text", { x: x(begin) + 8, y: y + 17, class: /^f/.test(kind) ? "on" : null }, text) : null);
      })];
    });
    return [rows.length * (high + 6) + 28, [axis, drawn]];
  });
}

function dated(from, to, s) {
  const text = moment(s);
  return to - from > 3 * 86400 ? text.slice(5, 10) : to - from > 6 * 3600 ? text.slice(5, 16) : text.slice(11);
}

/** Draw how old the last durable state was, from save to save; failures and starts as marks. */
function ages(label, saves, failures, starts, now_s) {
  const points = [];
  for (const [at, save] of saves.entries()) {
    if (at) points.push([save.at_s, save.at_s - saves[at - 1].state_s]);
    points.push([save.at_s, save.at_s - save.state_s]);
  }
  const from = saves[0].at_s, to = saves.at(-1).at_s === from ? from + 1 : saves.at(-1).at_s;
  return chart(label, (width) => {
    const high = 160, top = 10, largest = Math.max(...points.map(([, age]) => age), 1e-3), room = width - LEFT - RIGHT;
    const x = (s) => LEFT + room * (s - from) / (to - from), y = (age) => top + high * (1 - Math.max(0, age) / largest);
    const line = thinned(points.map(([s, age]) => [x(s), y(age)])).map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join("L");
    const inside = (s) => s >= from && s <= to;
    return [top + high + 26, [grid(largest, "seconds", seconds, width, top, high),
      draw("path", { class: "area", d: `M${LEFT} ${top + high}L${line}L${x(to)} ${top + high}Z` }), draw("path", { class: "line", d: `M${line}` }),
      starts.filter(inside).map((s) => draw("line", { class: "start", x1: x(s), x2: x(s), y1: top, y2: top + high }, draw("title", {}, `start at ${moment(s)}`))),
      failures.filter((each) => inside(each.at_s)).map((each) => draw("path", { class: "mark", d: `M${x(each.at_s) - 6} ${top + high}l6 -11l6 11z` }, draw("title", {}, `${each.kind} at ${moment(each.at_s)}`))),
      [[from, "start"], ...(width > 560 ? [[(from + to) / 2, "middle"]] : []), [to, "end"]].map(([s, anchor]) => draw("text", { class: "axis", x: x(s), y: top + high + 18, "text-anchor": anchor }, dated(from, to, s)))]];
  });
}

/** Leave out points that lie between others in the same half pixel. */
function thinned(points) {
  if (points.length < 3000) return points;
  const columns = new Map();
  for (const point of points) {
    const column = columns.get(Math.round(2 * point[0])) ?? [point, point];
    if (point[1] < column[0][1]) column[0] = point;
    if (point[1] > column[1][1]) column[1] = point;
    columns.set(Math.round(2 * point[0]), column);
  }
  return [...columns.values()].flat();
}
