// Builds the page around the canvas. Names come from files and might contain HTML, so they become text nodes, not
// markup.

/** Make an element with attributes and children, which are nodes, texts, or lists of these. Empty ones are left out. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== "" && child !== false));
  return element;
}
const put = (id, ...children) => $(id).replaceChildren(h("div", null, ...children));
const many = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
const swatch = (colour) => h("i", { class: "swatch", style: `background:${colour}` });
/** A titled list; nothing if it is empty. */
const section = (title, tag, attributes, content) => (content.length ? [h("h2", null, title), h(tag, attributes, content)] : []);
const table = (title, lines) => section(title, "table", null, lines);
const bars = (title, content) => section(title, "div", { class: "bars" }, content);
const line = (...cells) => h("tr", null, cells.map((cell) => h("td", null, cell)));
/** A bar made of `parts`, [share, colour] each. `action` has the attributes for a click on it. */
function bar(name, value, parts, action = null) {
  const inner = parts.map(([w, c]) => h("i", { style: `width:${100 * Math.min(w, 1)}%;background:${c}` }));
  const cells = [h("span", { class: "name", title: name }, name), h("span", { class: "bar" }, inner), h("span", { class: "value" }, value)];
  return action ? h("button", action, cells) : cells;
}
const link = (attributes, ...content) => h("button", { class: "link", ...attributes }, ...content);
const code = (text) => h("code", null, text);
const small = (...content) => h("small", null, ...content);
const warning = (text) => h("p", { class: "warning" }, text);

function headline() {
  const [s] = sources, clocks = Math.max(...sources.map((x) => x.summary.clock_error_s));
  const about = sources.flatMap((x) => [h("b", null, `${x.letter} ${seconds(x.summary.step_s)}`), ` per step · ${x.source} on ${x.machine} · `]);
  const all = sources.reduce((sum, x) => sum + x.intervals, 0), ranks = s.ranks > 1 ? `${s.ranks} ranks × ` : "";
  $("headline").replaceChildren(...about, `${ranks}${many(s.workers, "worker")} · ${many(s.tokens, "token row")} × ${s.layers} layers · ${many(all, "interval")}`, clocks ? ` · clocks of ranks agree within ±${seconds(clocks)}` : "");
  $("headline").title = sources.map((x) => `program ${x.program}`).join(", ");
}
function legend() {
  const used = new Set(shadeOf), item = (key, sample, name) => h("button", { "data-toggle": key, "aria-pressed": !hidden.has(key) }, sample, name);
  const families = meta.families.map(([family], f) => {
    const own = [...meta.phases.entries()].filter(([n, phase]) => phase.family === f && used.has(n));
    return own.length ? h("span", { class: "family" }, own.length > 1 && h("i", null, family), own.map(([n, { name }]) => item(n, swatch(colours.shade[n]), name))) : null;
  });
  const others = ["wait", "load"].map((name) => item(name, h("i", { class: `swatch ${name}` }), name));
  $("legend").replaceChildren(...families.filter(Boolean), h("span", { class: "family" }, others));
}

function summary() {
  walks.length = 0;
  spreads.clear();
  put("summary", meta.comparison && comparison(meta.comparison), sources.map(summaryOf));
}
function summaryOf(source) {
  const s = source.summary, o = s.overlap, path = s.critical_path;
  const numbers = (title, ...all) => [h("h2", null, title), h("div", { class: "numbers" }, all.map(([value, name, why]) => h("div", { title: why }, h("b", null, value), h("span", null, name))))];
  const most = Math.max(...s.instructions.map((x) => x.share)), worst = Math.max(0, ...s.waits.map((x) => x.share));
  const links = Object.entries(path.by_instruction).slice(0, 8).map(([name, t]) => [name, t, colours.accent, longestLinks(source, name), `${name} on the critical path`]);
  const chain = [...links, ["gaps", path.gap_s, colours.wait, longestGaps(source), "gaps of the critical path"]];
  return [
    source.letter && h("h2", { class: "trace" }, `${source.letter} · ${source.source} on ${source.machine}`),
    s.dropped > 0 && warning(`${many(s.dropped, "interval")} did not fit the trace's buffer. What is shown is incomplete.`),
    !s.waterfall.beyond && s.resources.some((x) => x.fraction > 1) && warning("The rate of a resource exceeds its peak: the machine's description or the clock is wrong."),
    h("h2", null, "Why is it not at the limit?"), waterfall(source),
    numbers("Step",
      [seconds(s.step_s), "per step", "last end − first begin, mean over launches"],
      [percent(s.busy), "workers busy", `COMPUTE or STORE, or a LOAD outside a wait; mean over workers. COMPUTE alone: ${percent(s.computing)}`],
      [percent(s.wait), "workers waiting", "counter or page waits without COMPUTE or STORE; mean over workers"],
      [`${(1 + s.imbalance).toFixed(2)} ×`, "busiest worker ÷ mean", "busy time of the busiest worker ÷ mean busy time"]),
    numbers("Overlap",
      [percent(o.phases), "phases overlapping", "time in which workers compute instructions of two or more (layer, phase) ÷ time in which some worker computes"],
      [percent(o.inside_worker), "loads hidden", "LOAD time before the load's own instruction computes: the part during waits or another COMPUTE ÷ all of it"],
      [percent(o.loads_under_compute), "loads under compute", "LOAD time during COMPUTE of the same worker ÷ LOAD time"],
      [percent(o.across_workers), "memory under compute", "time in which memory-bound and compute-bound instructions run at once ÷ time in which memory-bound ones run"],
      ...(source.ranks > 1 ? [[percent(o.across_ranks), "ranks overlapping", "time in which ranks compute instructions of two or more (layer, phase) ÷ time in which some worker computes"]] : []),
      [percent(s.exposed_communication), "exposed communication", "time in which a worker computes nothing and waits for a counter whose last arrival is remote ÷ (workers × step)"]),
    bars("Resources, of peak", s.resources.map((x) => bar(x.name, `${rate(x.rate, x.unit)} · ${percent(x.fraction)}`, [[x.fraction, colours.curve]]))),
    s.without_attention && h("p", null, "Without attention: this trace does not contain its work."),
    bars("Work", s.instructions.map((x) => work(x, most))),
    bars("Waits", s.waits.slice(0, 8).map((x) => bar(`${x.instruction} ← ${x.cause}`, percent(x.share), [[x.share / worst, colours.wait]], walkTo(source, x.places, `${x.instruction} waits for ${x.cause}`)))),
    bars("Critical path", chain.map(([name, t, colour, places, title]) => bar(name, percent(t / path.seconds), [[t / path.seconds, colour]], walkTo(source, places, title)))),
    s.per_worker.length <= 16 && bars("Workers", s.per_worker.map((x, l) => bar(laneName(source.lane0 + l), percent(x.busy), [[x.busy, colours.text], [x.wait, colours.wait]]))),
  ];
}
/** The bar of a phase's share of all work. Its outliers' time beyond the median has a colour of its own. */
function work(x, most) {
  const far = x.outliers ? (x.share * x.outliers_s) / x.total_s : 0, shade = colours.shade[meta.phases.findIndex((phase) => phase.name === x.name)];
  const value = x.outliers ? `${many(x.outliers, "outlier")} ${percent(far)} · ` : "";
  return bar(x.name, value + percent(x.share), [[(x.share - far) / most, shade], [far / most, colours.accent]], { "data-find": x.name });
}
/** The waterfall of a step's time: each bar begins where the previous one ends. Bars too short to see become one. */
function waterfall(source) {
  const s = source.summary, fall = s.waterfall, colour = { least: colours.text, resource: colours.curve, work: colours.accent, wait: colours.wait, idle: colours.dim };
  const title = (b) => (b.kind === "least" ? `least time, bound by ${b.name}` : b.kind === "resource" ? `${b.name} needs more` : b.name);
  const isShort = (b) => b.seconds < 0.004 * s.step_s, short = fall.bars.filter(isShort);
  const rest = { name: `${short.length} shorter ones: ${short.map(title).join(", ")}`, kind: "wait", seconds: short.reduce((sum, b) => sum + b.seconds, 0), places: short.flatMap((b) => b.places.slice(0, 1)) };
  let before = 0;
  const shown = [...fall.bars.filter((b) => !isShort(b)), ...(short.length > 1 ? [rest] : short)].map((b) => {
    const parts = [[before / s.step_s, "transparent"], [b.seconds / s.step_s, colour[b.kind]]];
    before += b.seconds;
    return bar(title(b), `${seconds(b.seconds)} · ${percent(b.seconds / s.step_s)}`, parts, walkTo(source, b.places, title(b)));
  });
  return [fall.beyond && warning(`The least time, ${seconds(fall.least_s)}, is more than the step: the machine's description or the clock is wrong.`), h("div", { class: "bars waterfall" }, shown)];
}
/** Compares the second trace with the first, over matched instructions only. */
function comparison(c) {
  const ratio = (x) => h("b", null, x === null ? "–" : `× ${Number(x.toPrecision(3))}`);
  const alone = c.only_first || c.only_second ? `; ${c.only_first.toLocaleString("en")} only in A, ${c.only_second.toLocaleString("en")} only in B` : "";
  return [h("h2", null, "B against A"), h("table", { class: "comparison" },
    h("tr", null, ["", "A", "B", "B ÷ A"].map((name) => h("th", null, name))),
    line("step", ...c.step_s.map((t) => seconds(t)), ratio(c.ratio)),
    c.instructions.map((x) => line(x.name, seconds(x.first_mean_s), seconds(x.second_mean_s), ratio(x.ratio)))),
  h("p", { class: "note" }, `Mean time of ${many(c.matched, "instruction")} with the same operands${alone}.`)];
}

// -- lists of places in the trace: the first click on a list shows its worst place, each further click the next one
const walks = [];
let walking = null;
function walkTo(source, places, title) {
  if (!places.length) return null;
  walks.push({ places: places.map((p) => ({ ...p, interval: p.interval < 0 ? -1 : source.first + p.interval })), source, title, at: -1 });
  return { "data-walk": walks.length - 1 };
}
function walk(n, by) {
  const list = walks[n], { places, source } = list;
  list.at = (list.at + by + places.length) % places.length;
  walking = n;
  const p = places[list.at], from = p.begin_s / meta.unit_s + source.shift, to = p.end_s / meta.unit_s + source.shift, wide = Math.max(to - from, 20);
  choose(p.interval);
  setView(from - wide, to + wide);
}
const WALKED = 12;
// The longest periods [from(l), to(l)] of critical-path links l. Both functions return seconds since the last launch
// began.
function linkPlaces(source, links, from, to) {
  const places = links.map((l) => ({ interval: l.interval, begin_s: source.lastLaunch + from(l), end_s: source.lastLaunch + to(l) }));
  return places.filter((p) => p.end_s > p.begin_s).sort((a, b) => b.end_s - b.begin_s - a.end_s + a.begin_s).slice(0, WALKED);
}
const longestLinks = (source, name) => linkPlaces(source, source.summary.critical_path.links.filter((l) => l.instruction === name), (l) => l.begin_s, (l) => l.end_s);
const longestGaps = (source) => linkPlaces(source, source.summary.critical_path.links, (l) => l.begin_s - l.gap_s, (l) => l.begin_s);

// -- how long the instructions of a phase take
const spreads = new Map();
/** The COMPUTE times of a phase in a trace: their number, median and range, and a list of the outliers. */
function spreadOf(source, shade) {
  return remembered(spreads, `${source.lane0} ${shade}`, () => {
    const own = [];
    for (let i = source.first; i < source.first + source.intervals; i++) if (kind[i] === COMPUTE && shadeOf[i] === shade) own.push(i);
    own.sort((a, b) => length[a] - length[b]);
    const median = length[own[own.length >> 1]];
    const far = own.filter((i) => median && length[i] > meta.outlier * median).reverse();
    const at = (i) => ({ interval: i - source.first, begin_s: (begin[i] - source.shift) * meta.unit_s, end_s: (endOf(i) - source.shift) * meta.unit_s });
    return { median, low: length[own[0]], high: length[own[own.length - 1]], count: own.length, far: far.length, walk: walkTo(source, far.slice(0, WALKED).map(at), `${meta.phases[shade].name} above ${meta.outlier} × the median`) };
  });
}
function samePhase(usual) {
  const above = `above ${meta.outlier} × the median`;
  const far = usual.far ? link(usual.walk, `${usual.far.toLocaleString("en")} ${above}`) : `none ${above}`;
  return [h("h2", null, `${usual.count.toLocaleString("en")} of this phase`), h("p", null, `${time(usual.low)} to ${time(usual.high)}, `, far)];
}

const partOfWorker = (i) => `${meta.kinds[kind[i]]}${role[i] ? `, ${meta.roles[role[i]]}` : ""}`;
const times = (x) => `× ${Number(x.toPrecision(3))}`;
function details() {
  $("details").hidden = selected < 0;
  if (selected < 0) return;
  const i = selected, phase = phaseOf(i), source = sourceOfLane(lane[i]), list = walks[walking];
  const usual = kind[i] === COMPUTE ? spreadOf(source, shadeOf[i]) : null, to = (j, text) => link({ "data-select": j }, text);
  const lines = [
    list?.places[list.at]?.interval === i && line("place", `${list.at + 1} of ${list.places.length}: ${list.title}`),
    line("begin", time(begin[i] - source.shift, 6)), line("end", time(endOf(i) - source.shift, 6)), line("duration", h("b", null, time(length[i], 4))),
    source.summary.launches > 1 && line("launch", launch[i] + 1),
    usual?.median > 0 && line("usual", `${time(usual.median)}; this one ${times(length[i] / usual.median)}`),
    kind[i] === COUNTER_WAIT && line("waits for", cause(i)),
  ];
  const wait = waitOf(i), by = wait >= 0 ? releaser[wait] : -1;
  if (by >= 0) {
    const error = rankOfLane(lane[wait]) !== rankOfLane(lane[by]) && source.summary.clock_error_s;
    lines.push(line("released by", to(by, `${phaseOf(by).name} · ${place(by)} · ${laneName(lane[by])}`)));
    lines.push(line("signal took", `${time(endOf(wait) - endOf(by))}${error ? ` ± ${seconds(error)}` : ""}`));
  }
  if (twin[i] >= 0) lines.push(line(`in ${sourceOfLane(lane[twin[i]]).letter}`, [to(twin[i], time(length[twin[i]], 4)), length[i] > 0 && ` (${times(length[twin[i]] / length[i])})`]));
  const after = [];
  for (let j = 0; j < count; j++) if (releaser[j] === i) after.push(j);
  const released = after.slice(0, 8).map((j) => line(laneName(lane[j]), to(j, phaseOf(j).name)));
  if (after.length > 8) released.push(line("", `${after.length - 8} more`));
  put("details",
    h("h3", null, swatch(colours.shade[shadeOf[i]]), phase.name),
    h("p", null, `${partOfWorker(i)} · ${place(i)} · ${laneName(lane[i])} · ${meta.families[phase.family][0]}`), h("table", null, lines),
    usual?.median > 0 && samePhase(usual),
    table("Operands", operands(record[i]).map(([name, value]) => line(code(name), code(value)))),
    table("Waits for", waitLines(i)),
    table("Same instruction", siblings(i).filter((j) => j !== i).map((j) => line(to(j, partOfWorker(j)), time(length[j])))),
    table("Released", released),
    table("Regions (rows, columns)", regionLines(i)),
    h("h2", null, "Meaning"), phase.meaning.map((text) => h("p", null, code(text))));
  document.querySelector("aside").scrollTop = 0;
}
function waitLines(i) {
  const words = Array.from({ length: WAITS }, (_, w) => [w, records[record[i] * WORDS + WAIT_AT + w]]).filter(([, word]) => word);
  return words.map(([w, word]) => line(["counter ", code(`${(word & COUNTER) - 1}${word & NEXT ? "+" : ""}`)], cause(i, w)));
}
function regionLines(i) {
  return [...regions(record[i])].map(([b, a, r0, r1, c0, c1, index, copy]) => {
    const tile = `${r0}:${r1}, ${c0}:${c1}`, find = { "data-find": `${meta.buffers[b]}[${tile.replace(" ", "")}]`, title: "Find what touches it" };
    const elsewhere = copy !== -1 && copy !== rankOfLane(lane[i]);
    return line([`${meta.accesses[a]} `, code(meta.buffers[b])],
      [link(find, code(tile)), index > 0 && small(` by ${meta.indexes[index]}`), elsewhere && small(` at ${meta.copies[copy] ?? `rank ${copy}`}`)]);
  });
}

/** What happened between two moments: shares of all workers' time, and the resources' mean rates. */
function measured() {
  $("measured").hidden = !measure || measure.a === measure.b;
  if ($("measured").hidden) return;
  const a = Math.min(measure.a, measure.b), b = Math.max(measure.a, measure.b);
  put("measured", h("h3", null, time(b - a, 4)), h("p", null, `from ${time(a, 6)} to ${time(b, 6)}`), sources.map((s) => {
    const all = { lane0: s.lane0, lane1: s.lane0 + s.ranks * s.workers }, sums = new Share(1);
    addPieces(all, sums, a, b, 1 / (b - a));
    return [
      bars(`${s.letter} share of the workers' time`, largest(sums, all, 0.0005).map(([v, p]) => bar(partName(p), percent(v), [[v, p === WAITING ? colours.wait : colours.shade[p]]]))),
      bars(`${s.letter} resources, of peak`, tracks.map(({ r, name }) => { const v = meanRate(s, r, a, b); return bar(name, `${rate(v * s.resources[r].peak, s.resources[r].unit)} · ${percent(v)}`, [[v, colours.curve]]); })),
    ];
  }));
}
/** What a row's workers do in one column: [fraction of their time, part], the largest first, without those below `least`. */
const largest = ({ sums }, row, least) => [...sums].map((v, p) => [v / (row.lane1 - row.lane0), p]).filter(([v]) => v > least).sort((x, y) => y[0] - x[0]);

function tooltip(x, y, row, track = -1, layers = undefined) {
  const tip = $("tooltip"), at = x * size.k;
  const content = hovered >= 0 ? aboutInterval(hovered) : track >= 0 ? aboutTrack(track, at) : layers ? aboutBlock(layers, at) : row ? aboutColumn(row, at) : [];
  tip.hidden = !content.length;
  if (tip.hidden) return;
  tip.replaceChildren(...content);
  const right = x + 16 + tip.offsetWidth > canvas.clientWidth;
  tip.style.left = `${right ? Math.max(0, x - tip.offsetWidth - 12) : x + 16}px`;
  tip.style.top = `${Math.max(0, Math.min(y + 18, canvas.clientHeight - tip.offsetHeight - 4))}px`;
}
function aboutInterval(i) {
  const values = operands(record[i]).map(([n, v]) => `${n} ${v}`).join(", "), name = isWait(i) ? `${phaseOf(i).name} ${label(i)}` : label(i);
  const where = [place(i), laneName(lane[i]), role[i] && meta.roles[role[i]], values];
  return [h("b", null, name), `  ${time(length[i])}`, small(where.filter(Boolean).join(" · "))];
}
function aboutTrack(n, x) {
  const { r, name } = tracks[n], t0 = toTime(x), t1 = t0 + 1 / scale();
  return sources.flatMap((s) => {
    const value = meanRate(s, r, t0, t1), [low, high] = spread(s, r, t0, t1), { peak, unit } = s.resources[r];
    const ranks = s.ranks > 1 ? `, ranks ${percent(low)} to ${percent(high)}` : "";
    return [h("b", null, `${s.letter} ${name}`.trim()), ` ${rate(value * peak, unit)}`, small(`${percent(value)} of ${rate(peak, unit)} per rank${ranks}`)];
  });
}
/** The tooltip of a layer, or of a phase in a layer. */
function aboutBlock({ s, shade }, x) {
  const block = blockAt({ s, shade }, toTime(x));
  return block ? [h("b", null, block.name), ` ${shade < 0 ? "" : meta.phases[shade].name} ${time(block.t1 - block.t0)}`, small(`from ${time(block.t0 - s.shift, 6)} to ${time(block.t1 - s.shift, 6)}`)] : [];
}
/** The tooltip of a rank: what its workers do in one column of pixels. */
function aboutColumn(row, x) {
  if (x < gutter() || row.type !== "rank") return [];
  const parts = largest(rowShare(row, new Share(1), toTime(x), scale(), false), row, 0.005).slice(0, 6);
  return [h("b", null, row.text), ` at ${time(toTime(x), 6)}`, ...parts.map(([v, p]) => small(`${percent(v)} ${partName(p)}`))];
}
