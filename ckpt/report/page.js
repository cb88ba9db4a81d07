
// The page: sections of a checkpoint, and of a run.

function tile(title, value, text, more = null) {
  return el("div", {}, el("dt", {}, title), el("dd", { "data-value": value, "data-name": title }, text, more ? el("small", {}, more) : null));
}

function card(id, title, ...children) {
  return el("section", { class: "card", id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), children);
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, text]) => text).map(([name, text, value]) => [el("dt", {}, name), el("dd", { "data-value": value ?? null, "data-name": name }, text)]));
}

function sized(sums) {
  return el("span", {}, Object.entries(sums).filter(([, bytes]) => bytes).map(([name, bytes], at) =>
    [at ? ", " : "", el("span", { "data-kind": name, "data-value": bytes }, `${name} ${size(bytes)}`)]));
}

function overview(c) {
  const written = c.commit === null ? c.stored_bytes : c.commit.data_bytes;
  const phases = Object.values(c.seconds), whole = phases.reduce((sum, s) => sum + s, 0);
  const retries = c.ranks.retries.reduce((sum, each) => sum + each, 0);
  return el("dl", { class: "tiles" },
    tile("own bytes", written, size(written), `in ${count(c.files, "file")}`),
    c.referred_bytes ? tile("referred bytes", c.referred_bytes, size(c.referred_bytes), `in ${count(c.bases.length, "other checkpoint")}`) : null,
    tile("parameters", c.parameters, large(c.parameters), count(c.parameters)),
    tile("tensors", c.tensors, count(c.tensors), `and ${count(c.objects, "object")}`),
    c.commit ? tile("ranks", c.commit.world_size, count(c.commit.world_size), "that saved it") : null,
    phases.length ? tile("save", whole, seconds(whole), `until the commit · ${count(retries, "request")} sent again`) : null);
}

function large(number) {
  for (const [unit, length] of [["T", 1e12], ["B", 1e9], ["M", 1e6]]) {
    if (number >= length) return `${(number / length).toPrecision(3)} ${unit}`;
  }
  return count(number);
}

function contents(c) {
  const map = new Treemap(c);
  const made = card("contents", "What is in it", el("p", { class: "quiet" }, "Each area is as large as its bytes; every element counts once. Click a module, or move with the arrow keys, ",
    el("kbd", {}, "Enter"), " to open and ", el("kbd", {}, "Esc"), " to go back."), map.element());
  map.show();
  return made;
}

function timeline(c) {
  const { plan_s: plan, write_s: write, index_s: index } = c.seconds;
  if (plan === undefined) return null;
  const before = plan + write + index, phases = [["plan", 0, plan, "f1"], ["write", plan, write, "f0"], ["index", plan + write, index, "f2"]];
  if (c.event.commit_s > index) phases.push(["commit", before, c.event.commit_s - index, "f3"]);  // the event counts the index in
  const order = slowest(c.ranks), rows = [["all ranks", phases.map(([title, begin, length, kind]) => [begin, begin + length, kind, title])]];
  const some = order.length > 5 ? [order[0], order[1], order[2], order[order.length >> 1], order.at(-1)] : order;
  const titles = new Map([[order.at(-1), "fastest"], [order[order.length >> 1], "median"]]);
  for (const at of order.length > 1 ? some : []) {
    const title = order.length > 5 && titles.get(at) ? `rank ${c.ranks.rank[at]}, ${titles.get(at)}` : `rank ${c.ranks.rank[at]}`;
    rows.push([title, [[plan, plan + c.ranks.s[at], "soft", c.ranks.bytes[at] === null ? "wrote" : size(c.ranks.bytes[at])]]]);
  }
  const words = phases.map(([title, , length]) => `${title} ${seconds(length)}`).join(", ");
  const columns = [["phase"], ["seconds", "right"], ["meaning", "wrap"]];
  const meanings = { plan: "until the first rank begins to write: look at the place, agree who writes what", write: "until all ranks have written, and the first one knows",
    index: "until the index is stored, and all that the commit names", commit: "one atomic put, and what stock PyTorch reads (from the events)" };
  const training = c.event.stall_s === undefined ? null : el("p", { class: "say" }, "Training waited ", el("strong", { "data-name": "stall_s", "data-value": c.event.stall_s }, seconds(c.event.stall_s)),
    ` of the ${seconds(c.event.upload_s ?? before)} from the step until the checkpoint was durable.`);
  return card("save", "How it was saved", el("p", { class: "say" }, `${words}.`), training, spans(`Phases of the save: ${words}`, rows),
    folded("As a table", () => table("Phases of the save", columns, phases.map(([title, , length]) => [title, [seconds(length), length], meanings[title]]))));
}

function figure(title, label, values, options) {
  return el("div", {}, el("h3", {}, title), bars(label, values, options));
}

function slowest(ranks) {
  return ranks.rank.map((_, at) => at).filter((at) => ranks.s[at] !== null).sort((a, b) => ranks.s[b] - ranks.s[a]);
}

function ranksOf(c) {
  const { rank, bytes, s, retries } = c.ranks, order = slowest(c.ranks), name = (at) => `rank ${rank[at]}`;
  const sizes = bytes.filter((each) => each !== null), parts = [], charts = [];
  if (!rank.length || (!order.length && !sizes.length)) return null;
  if (order.length) {
    const [first] = order, usual = median(order.map((at) => s[at])), sum = retries.reduce((all, each) => all + each, 0);
    const factor = usual > 0 ? `, ${(s[first] / usual).toFixed(1)} times the median of ${seconds(usual)}` : "";
    parts.push(el("p", { class: "say" }, "Slowest: ", el("strong", { "data-name": "slowest", "data-value": rank[first] }, name(first)), " with ",
      el("strong", { "data-name": "slowest_s", "data-value": s[first] }, seconds(s[first])), `${rank.length > 1 ? factor : ""}. `,
      el("span", { "data-name": "retries", "data-value": sum }, sum ? `${count(sum, "request")} sent again, most by ${name(retries.indexOf(Math.max(...retries)))}.` : "No request was sent again.")));
    if (rank.length > 1) {
      charts.push(figure("Seconds to write", `Seconds to write, by rank; slowest: ${name(first)}, ${seconds(s[first])}`, s, { kind: "seconds", write: seconds, name, high: 110, marked: (at) => at === first }));
    }
  }
  if (sizes.length > 1) charts.push(figure("Bytes written", "Bytes written, by rank", bytes, { kind: "bytes", write: size, name, high: 110 }));
  if (retries.some(Boolean) && rank.length > 1) charts.push(figure("Requests sent again", "Requests sent again, by rank", retries, { kind: "counts", write: (n) => count(n), name, high: 110 }));
  parts.push(el("div", { class: rank.length > 48 ? "stack" : "stack columns" }, charts));
  const listed = order.length ? order : rank.map((_, at) => at), most = 1000;
  const columns = [["rank"], ["seconds", "right"], ["bytes", "right"], ["bytes a second", "right"], ["sent again", "right"]];
  const title = listed.length > most ? `The ${count(most)} slowest ranks as a table` : "All ranks as a table, the slowest first";
  parts.push(folded(title, () => table(title, columns, listed.slice(0, most).map((at) => [[String(rank[at]), rank[at]], [seconds(s[at]), s[at]], [size(bytes[at]), bytes[at]],
    s[at] && bytes[at] !== null ? size(Math.round(bytes[at] / s[at])) : "–", [count(retries[at]), retries[at]]]))));
  return card("ranks", "Ranks", parts);
}

function bases(c) {
  if (!c.bases.length) return null;
  const own = c.commit.data_bytes, all = own + c.referred_bytes;
  const rows = [["this checkpoint", own, ""], ...c.bases.map((base) => [base.path, base.referred_bytes, base.id])];
  return card("bases", "Own and referred bytes", el("p", { class: "say" }, `${size(own)} lie here; ${size(c.referred_bytes)} (${percent(c.referred_bytes, all)}) are named in ${count(c.bases.length, "checkpoint")} beside it, which must stay.`),
    bars("Bytes by the checkpoint in which they lie", rows.map(([, bytes]) => bytes), { kind: "bytes", write: size, name: (at) => rows[at][0], high: 90, marked: (at) => at === 0 }),
    folded("As a table", () => table("Where the bytes lie", [["checkpoint"], ["bytes", "right"], ["share", "right"], ["commit"]], rows.map(([path, bytes, id]) => [path, [size(bytes), bytes], percent(bytes, all), id]))));
}

function details(c) {
  const tags = c.commit ? Object.entries(c.commit.tags).map(([name, text]) => `${name}=${text}`).join(", ") : "";
  const writer = c.format === "stock" ? "stock PyTorch (no checksums, no commit record)" : c.format === "safetensors" ? "safetensors of another program (no checksums)" : `${c.format}, version ${c.version}`;
  return card("details", "Details", facts([["format", writer], ["committed", c.commit?.created_at], ["id", c.commit?.id], ["written by", c.commit ? `${c.commit.library}, torch ${c.commit.torch}` : ""], ["tags", tags],
    ["by part", sized(c.bytes_by_part)], ["by dtype", sized(c.bytes_by_dtype)], ["stored items", size(c.stored_bytes), c.stored_bytes]]));
}

function checkpointSections(c) {
  return [contents(c), timeline(c), ranksOf(c), bases(c), details(c)];
}

// -- a run ---------------------------------------------------------------------------------------------

const MOST_METRICS = 8;
const STATES = { committed: "committed", incomplete: "incomplete (an interrupted or running save)", foreign: "of stock PyTorch", damaged: "damaged", unreadable: "not readable" };

function runTiles(run) {
  const last = run.saves.at(-1), age = last ? Math.max(0, DATA.made_at_s - last.state_s) : null;
  const bytes = run.checkpoints.reduce((sum, each) => sum + (each.size_bytes ?? 0), 0), states = run.checkpoints.filter((each) => each.state === "committed").length;
  return el("dl", { class: "tiles" },
    tile("durable age", age, seconds(age), last && last.step !== null ? `of step ${count(last.step)}, when this was made` : "when this was made"),
    tile("interval", run.interval_median_s, seconds(run.interval_median_s), run.interval_max_s === null ? "between checkpoints" : `median; longest ${seconds(run.interval_max_s)}`),
    tile("checkpoints", run.count, count(run.count), `${count(states)} committed`), tile("their own bytes", bytes, size(bytes), "without what they refer to"),
    tile("failed saves", run.has_events ? run.failed : null, run.has_events ? count(run.failed) : "–", run.has_events ? "by the events" : "no events given (--events)"));
}

function ageSection(run) {
  if (run.saves.length < 2) return null;
  const oldest = run.saves.slice(1).map((save, at) => save.at_s - run.saves[at].state_s), most = Math.max(...oldest), at = oldest.indexOf(most) + 1;
  const words = `At worst the last durable state was ${seconds(most)} old, before ${stepOf(run.saves[at])}.`;
  const columns = [["step"], ["durable at (UTC)"], ["age before", "right"], ["took", "right"], ["training waited", "right"], ["size", "right"], ["sent again", "right"]];
  return card("age", "Age of the last durable state", el("p", { class: "say" }, words), ages(`Age of the last durable state over time. ${words}`, run.saves, run.failures, run.starts_s),
    el("p", { class: "quiet" }, "It grows while the training goes on, and falls with each checkpoint.", run.failures.length ? " Triangles: failures." : "", run.starts_s.length ? " Dashed lines: starts of the run." : "", " Times are UTC."),
    folded("As a table", () => table("Saves, the newest first", columns, run.saves.map((save, i) => [stepOf(save), moment(save.at_s), i ? [seconds(save.at_s - run.saves[i - 1].state_s), save.at_s - run.saves[i - 1].state_s] : "–",
      [seconds(save.upload_s), save.upload_s ?? null], seconds(save.stall_s), size(save.size_bytes), count(save.retries ?? 0)]).reverse().slice(0, 1000))));
}

function stepOf(save) {
  return save.step === null ? "a checkpoint without a step" : `step ${count(save.step)}`;
}

function failureSection(run) {
  if (!run.failures.length) return null;
  return card("failures", "Failures", el("p", { class: "say" }, el("span", { class: "bad" }, count(run.failures.length, "event")), " that somebody may want to look at, the newest first."),
    table("Failures, the newest first", [["when (UTC)"], ["event"], ["step", "right"], ["reason", "wrap"]], run.failures.map((each) => [moment(each.at_s), each.kind.replaceAll("_", " "), each.step === null ? "" : count(each.step), each.reason]).reverse()));
}

function historySection(run) {
  const timed = run.saves.filter((save) => save.upload_s !== undefined), name = (saves) => (at) => (saves[at].step === null ? String(at + 1) : `step ${count(saves[at].step)}`);
  const kept = run.checkpoints.filter((each) => each.state === "committed");
  const parts = [];
  if (timed.length > 1) parts.push(el("h3", {}, "Seconds from the step until durable"), bars("Seconds of each save", timed.map((save) => save.upload_s), { kind: "seconds", write: seconds, name: name(timed), high: 110 }));
  if (kept.length > 1) {
    const label = kept.some((each) => each.referred_bytes) ? "Size: own bytes, and in a lighter colour what they refer to" : "Size";
    parts.push(el("h3", {}, label), bars("Size of each checkpoint", kept.map((each) => each.size_bytes), { kind: "bytes", write: size, name: name(kept), high: 110, shades: kept.map((each) => each.referred_bytes ?? 0) }));
  }
  const metrics = [...new Set(run.checkpoints.flatMap((each) => Object.keys(each.metrics)))].slice(0, MOST_METRICS);
  const columns = [["checkpoint"], ["step", "right"], ["state"], ["own bytes", "right"], ["referred", "right"], ...metrics.map((each) => [each, "right"]), ["saved at (UTC)"], ["took", "right"], ["ranks", "right"], ["sent again", "right"], ["problem", "wrap"]];
  const rows = run.checkpoints.map((each) => [`${each.path || "."}${each.latest ? " (latest)" : ""}`, each.step === null ? "" : [count(each.step), each.step], STATES[each.state] ?? each.state, [size(each.size_bytes), each.size_bytes],
    [each.referred_bytes ? size(each.referred_bytes) : "", each.referred_bytes], ...metrics.map((name) => [metric(each.metrics[name]), each.metrics[name] ?? null]), moment(each.created_at_s), seconds(each.save_s), each.world_size === null ? "" : count(each.world_size), each.retries ? count(each.retries) : "", each.problem]).reverse();
  return card("history", "Checkpoints", parts, el("h3", {}, rows.length < run.count ? `The newest ${count(rows.length)} of ${count(run.count)}` : "All of them, the newest first"), table("Checkpoints, the newest first", columns, rows.slice(0, 1000)));
}

// -- put together --------------------------------------------------------------------------------------

function nameOf(url) {
  return url.replace(/\/+$/, "").split("/").at(-1) || url;
}

function main() {
  const { run, checkpoint: c } = DATA, url = run ? run.url : c.url, chosen = document.documentElement.dataset.theme ?? "";
  document.getElementById("themes").append(...choices("theme", [["", "System"], ["light", "Light"], ["dark", "Dark"]], chosen, (theme) => {
    document.documentElement.dataset.theme = theme;
  }));
  const parts = [el("h1", {}, nameOf(url)), el("p", { class: "place" }, url)];
  if (run) {
    parts.push(runTiles(run), ageSection(run), failureSection(run), historySection(run));
    if (DATA.problem) parts.push(el("p", { class: "card bad" }, DATA.problem));
    if (c) parts.push(el("h1", { class: "latest" }, `Latest: ${nameOf(c.url)}`), el("p", { class: "place" }, c.url));
  }
  if (c) parts.push(overview(c), ...checkpointSections(c));
  document.getElementById("main").replaceChildren(...parts.filter((part) => part !== null));
  document.getElementById("footer").append(el("p", {}, `Made by ckpt report at ${moment(DATA.made_at_s)} UTC. This page needs no network; what it shows is inside it.`));
}

main();
