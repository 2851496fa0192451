// The page around the canvas: headline, legend, summary, details of the selection, measured range, tooltip.

function headline() {
  const about = (s) => `<b>${s.letter} ${seconds(s.summary.step_s)}</b> per step · ${escape(s.source)} on ${escape(s.machine)}`;
  const [s] = sources, all = sources.reduce((sum, x) => sum + x.intervals, 0), ranks = s.ranks > 1 ? `${s.ranks} ranks × ` : "";
  const clocks = sources.some((x) => x.summary.clock_error_s) ? ` · clocks of ranks agree within ±${seconds(Math.max(...sources.map((x) => x.summary.clock_error_s)))}` : "";
  $("headline").innerHTML = `${sources.map(about).join(" &nbsp; ")} · ${ranks}${s.workers} worker${s.workers > 1 ? "s" : ""} · ${s.tokens} token row${s.tokens > 1 ? "s" : ""} × ${s.layers} layers · ${all.toLocaleString("en")} intervals${clocks}`;
  $("headline").title = sources.map((x) => `program ${x.program}`).join(", ");
}
function legend() {
  const used = new Set(shadeOf), item = (key, swatch, name) => `<button data-toggle="${key}" aria-pressed="${!hidden.has(key)}">${swatch}${name}</button>`;
  const families = meta.families.map(([name], f) => {
    const own = meta.phases.map((phase, n) => [phase, n]).filter(([phase, n]) => phase.family === f && used.has(n));
    if (!own.length) return "";
    return `<span class="family">${own.length > 1 ? `<i>${name}</i>` : ""}${own.map(([{ name }, n]) => item(n, `<i class="swatch" style="background:${colours.shade[n]}"></i>`, name)).join("")}</span>`;
  });
  const others = item("wait", '<i class="swatch wait"></i>', "wait") + item("load", '<i class="swatch load"></i>', "load");
  $("legend").innerHTML = `${families.join("")}<span class="family">${others}</span>`;
}
/** The HTML of a bar made of `parts`, [share, colour] each. `action` is the HTML attribute for a click on it. */
const bar = (name, value, parts, action) => {
  const inner = parts.map(([w, c]) => `<i style="width:${100 * Math.min(w, 1)}%;background:${c}"></i>`).join("");
  const cells = `<span class="name" title="${escape(name)}">${escape(name)}</span><span class="bar">${inner}</span><span class="value">${value}</span>`;
  return action ? `<button ${action}>${cells}</button>` : cells;
};
/** The bar of a phase's share of all work. Its outliers' time beyond the median has a colour of its own. */
function work(x, most) {
  const far = x.outliers ? (x.share * x.outliers_s) / x.total_s : 0;
  const value = x.outliers ? `${x.outliers.toLocaleString("en")} outlier${x.outliers > 1 ? "s" : ""} ${percent(far)} · ` : "";
  return bar(x.name, value + percent(x.share), [[(x.share - far) / most, shadeOfName(x.name)], [far / most, colours.accent]], `data-find="${x.name}"`);
}
const shadeOfName = (name) => colours.shade[meta.phases.findIndex((phase) => phase.name === name)];

function summary() {
  walks.length = 0;
  spreads.clear();
  $("summary").innerHTML = (meta.comparison ? comparison(meta.comparison) : "") + sources.map(summaryOf).join("");
}
function summaryOf(source) {
  const s = source.summary, o = s.overlap;
  const number = (value, name, title) => `<div title="${escape(title)}"><b>${value}</b><span>${name}</span></div>`;
  const most = Math.max(...s.instructions.map((x) => x.share)), worst = Math.max(0, ...s.waits.map((x) => x.share));
  const path = s.critical_path, workers = s.per_worker.length <= 16 ? s.per_worker : [];
  return `
    ${source.letter ? `<h2 class="trace">${source.letter} · ${escape(source.source)} on ${escape(source.machine)}</h2>` : ""}
    ${s.dropped ? `<p class="warning">${s.dropped.toLocaleString("en")} intervals were dropped: the buffer was full. What is shown is incomplete.</p>` : ""}
    ${!s.waterfall.beyond && s.resources.some((x) => x.fraction > 1) ? '<p class="warning">The rate of a resource exceeds its peak: the machine\'s description or the clock is wrong.</p>' : ""}
    <h2>Why is it not at the limit?</h2>${waterfall(source)}
    <h2>Step</h2><div class="numbers">
    ${number(seconds(s.step_s), "per step", "last end − first begin, mean over launches")}
    ${number(percent(s.busy), "workers busy", `COMPUTE or STORE, or a LOAD outside a wait; mean over workers. COMPUTE alone: ${percent(s.computing)}`)}
    ${number(percent(s.wait), "workers waiting", "counter or page waits without COMPUTE or STORE; mean over workers")}
    ${number(percent(s.imbalance), "imbalance", "busiest worker ÷ mean − 1")}</div>
    <h2>Overlap</h2><div class="numbers">
    ${number(percent(o.phases), "phases overlapping", "time in which workers compute instructions of two or more (layer, phase) ÷ time in which some worker computes")}
    ${number(percent(o.inside_worker), "loads hidden", "LOAD time before the load's own instruction computes: the part during waits or another COMPUTE ÷ all of it")}
    ${number(percent(o.loads_under_compute), "loads under compute", "LOAD time during COMPUTE of the same worker ÷ LOAD time")}
    ${number(percent(o.across_workers), "memory under compute", "time in which memory-bound and compute-bound instructions run at once ÷ time in which memory-bound ones run")}
    ${source.ranks > 1 ? number(percent(o.across_ranks), "ranks overlapping", "time in which ranks compute instructions of two or more (layer, phase) ÷ time in which some worker computes") : ""}
    ${number(percent(s.exposed_communication), "exposed communication", "time in which a worker computes nothing and waits for a counter whose last arrival is remote ÷ (workers × step)")}</div>
    ${s.resources.length ? `<h2>Resources, of peak</h2><div class="bars">${s.resources.map((x) => bar(x.name, `${rate(x.rate, x.unit)} · ${percent(x.fraction)}`, [[x.fraction, colours.curve]])).join("")}</div>${s.without_attention ? "<p>Without attention: this trace does not contain its work.</p>" : ""}` : ""}
    <h2>Work</h2><div class="bars">${s.instructions.map((x) => work(x, most)).join("")}</div>
    <h2>Waits</h2><div class="bars">${s.waits.slice(0, 8).map((x) => bar(`${x.instruction} ← ${x.cause}`, percent(x.share), [[x.share / worst, colours.wait]], walkTo(source, x.places, `${x.instruction} waits for ${x.cause}`))).join("")}</div>
    <h2>Critical path</h2><div class="bars">${Object.entries(path.by_instruction).slice(0, 8).map(([n, t]) => bar(n, percent(t / path.seconds), [[t / path.seconds, colours.accent]], walkTo(source, longestLinks(source, n), `${n} on the critical path`))).join("")}${bar("gaps", percent(path.gap_s / path.seconds), [[path.gap_s / path.seconds, colours.wait]], walkTo(source, longestGaps(source), "gaps of the critical path"))}</div>
    ${workers.length ? `<h2>Workers</h2><div class="bars">${workers.map((x, l) => bar(laneName(source.lane0 + l), percent(x.busy), [[x.busy, colours.text], [x.wait, colours.wait]])).join("")}</div>` : ""}`;
}
// -- lists of places in the trace: the first click on a list shows its worst place, each further click the next one
const walks = [];
let walking = null;
function walkTo(source, places, title) {
  if (!places.length) return "";
  walks.push({ places: places.map((p) => ({ ...p, interval: p.interval < 0 ? -1 : source.first + p.interval })), source, title, at: -1 });
  return `data-walk="${walks.length - 1}"`;
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
/** The longest stretches [from(l), to(l)] of `links` of the critical path. Their times count from the last launch. */
function linkPlaces(source, links, from, to) {
  const places = links.map((l) => ({ interval: l.interval, begin_s: source.lastLaunch + from(l), end_s: source.lastLaunch + to(l) }));
  return places.filter((p) => p.end_s > p.begin_s).sort((a, b) => b.end_s - b.begin_s - a.end_s + a.begin_s).slice(0, WALKED);
}
const longestLinks = (source, name) => linkPlaces(source, source.summary.critical_path.links.filter((l) => l.instruction === name), (l) => l.begin_s, (l) => l.end_s);
const longestGaps = (source) => linkPlaces(source, source.summary.critical_path.links, (l) => l.begin_s - l.gap_s, (l) => l.begin_s);

// -- how long the instructions of a phase take
const spreads = new Map(), BINS = 24;
/** The COMPUTE times of a phase in a trace: the median, counts in logarithmic bins, and a list of the outliers. */
function spreadOf(source, shade) {
  return remembered(spreads, `${source.lane0} ${shade}`, () => {
    const own = [];
    for (let i = source.first; i < source.first + source.intervals; i++) if (kind[i] === COMPUTE && shadeOf[i] === shade) own.push(i);
    own.sort((a, b) => length[a] - length[b]);
    const median = length[own[own.length >> 1]], low = Math.max(length[own[0]], 1), high = Math.max(length[own[own.length - 1]], low + 1);
    const bin = (units) => Math.min(BINS - 1, Math.floor((BINS * Math.log(Math.max(units, low) / low)) / Math.log(high / low)));
    const bins = new Uint32Array(BINS);
    for (const i of own) bins[bin(length[i])]++;
    const far = own.filter((i) => median && length[i] > meta.outlier * median).reverse();
    const at = (i) => ({ interval: i - source.first, begin_s: (begin[i] - source.shift) * meta.unit_s, end_s: (endOf(i) - source.shift) * meta.unit_s });
    return { median, low, high, bin, bins, count: own.length, far: far.length, walk: walkTo(source, far.slice(0, WALKED).map(at), `${meta.phases[shade].name} above ${meta.outlier} × the median`) };
  });
}
function histogram(usual, units) {
  const most = Math.max(...usual.bins), mine = usual.bin(units);
  const bars = [...usual.bins].map((n, b) => `<i style="height:${n ? Math.max(2, (40 * n) / most) : 0}px;background:${b === mine ? colours.accent : colours.curve}"></i>`);
  const far = usual.far ? `<button class="link" ${usual.walk}>${usual.far.toLocaleString("en")} above ${meta.outlier} × the median</button>` : `none above ${meta.outlier} × the median`;
  return `<h2>${usual.count.toLocaleString("en")} of this phase</h2><div class="histogram">${bars.join("")}</div><p>${time(usual.low)} to ${time(usual.high)}, ${far}</p>`;
}

/** From the least time to the step: each bar begins where the previous one ends. Bars too short to see become one. */
function waterfall(source) {
  const s = source.summary, fall = s.waterfall, colour = { least: colours.text, resource: colours.curve, work: colours.accent, wait: colours.wait, idle: colours.dim };
  const title = (b) => (b.kind === "least" ? `least time, bound by ${b.name}` : b.kind === "resource" ? `${b.name} needs more` : b.name);
  const isShort = (b) => b.seconds < 0.004 * s.step_s, short = fall.bars.filter(isShort);
  const rest = { name: `${short.length} shorter ones: ${short.map(title).join(", ")}`, kind: "wait", seconds: short.reduce((sum, b) => sum + b.seconds, 0), places: short.flatMap((b) => b.places.slice(0, 1)) };
  let before = 0;
  const bars = [...fall.bars.filter((b) => !isShort(b)), ...(short.length ? [rest] : [])].map((b) => {
    const parts = [[before / s.step_s, "transparent"], [b.seconds / s.step_s, colour[b.kind]]];
    before += b.seconds;
    return bar(title(b), `${seconds(b.seconds)} · ${percent(b.seconds / s.step_s)}`, parts, walkTo(source, b.places, title(b)));
  });
  const beyond = fall.beyond ? `<p class="warning">The least time, ${seconds(fall.least_s)}, is more than the step: the machine's description or the clock is wrong.</p>` : "";
  return `${beyond}<div class="bars waterfall">${bars.join("")}</div>`;
}
/** Compares the second trace with the first, over matched instructions only. */
function comparison(c) {
  const times = (x) => (x === null ? "–" : `× ${Number(x.toPrecision(3))}`);
  const line = (name, a, b, ratio) => `<tr><td>${escape(name)}</td><td>${seconds(a)}</td><td>${seconds(b)}</td><td><b>${times(ratio)}</b></td></tr>`;
  return `<h2>B against A</h2><table class="comparison"><tr><th></th><th>A</th><th>B</th><th>B ÷ A</th></tr>
    ${line("step", ...c.step_s, c.ratio)}${c.instructions.map((x) => line(x.name, x.first_mean_s, x.second_mean_s, x.ratio)).join("")}</table>
    <p class="note">Mean time of ${c.matched.toLocaleString("en")} instructions with the same operands${c.only_first || c.only_second ? `; ${c.only_first.toLocaleString("en")} only in A, ${c.only_second.toLocaleString("en")} only in B` : ""}.</p>`;
}

function details() {
  const panel = $("details");
  panel.hidden = selected < 0;
  if (selected < 0) return;
  const i = selected, r = record[i], phase = phaseOf(i), lines = [], family = meta.families[phase.family][0], source = sourceOfLane(lane[i]);
  const line = (name, value) => lines.push(`<tr><td>${name}</td><td>${value}</td></tr>`);
  const link = (j, text) => `<button class="link" data-select="${j}">${escape(text)}</button>`;
  const where = (j) => `${phaseOf(j).name} · ${place(j)} · ${laneName(lane[j])}`;
  if (walking !== null && walks[walking]?.places[walks[walking].at]?.interval === i) line("place", `${walks[walking].at + 1} of ${walks[walking].places.length}: ${escape(walks[walking].title)}`);
  line("begin", time(begin[i] - source.shift, 6));
  line("end", time(endOf(i) - source.shift, 6));
  line("duration", `<b>${time(length[i], 4)}</b>`);
  if (source.summary.launches > 1) line("launch", launch[i] + 1);
  const usual = kind[i] === COMPUTE ? spreadOf(source, shadeOf[i]) : null;
  if (usual?.median) line("usual", `${time(usual.median)}; this one × ${Number((length[i] / usual.median).toPrecision(3))}`);
  if (kind[i] === COUNTER_WAIT) line("waits for", escape(cause(i)));
  const wait = isWait(i) ? i : waitOf(i);
  if (wait >= 0 && releaser[wait] >= 0) {
    line("released by", link(releaser[wait], where(releaser[wait])));
    const remote = rankOfLane(lane[wait]) !== rankOfLane(lane[releaser[wait]]), error = source.summary.clock_error_s;
    line("signal took", `${time(endOf(wait) - endOf(releaser[wait]))}${remote && error ? ` ± ${seconds(error)}` : ""}`);
  }
  if (twin[i] >= 0) {
    const ratio = length[i] ? ` (× ${Number((length[twin[i]] / length[i]).toPrecision(3))})` : "";
    line(`in ${sourceOfLane(lane[twin[i]]).letter}`, `${link(twin[i], time(length[twin[i]], 4))}${ratio}`);
  }
  const operandRows = operands(r).map(([n, v]) => `<tr><td><code>${n}</code></td><td><code>${v}</code></td></tr>`);
  const waits = [];
  for (let w = 0; w < WAITS; w++) {
    const word = records[r * WORDS + WAIT_AT + w];
    if (word) waits.push(`<tr><td>counter <code>${(word & COUNTER) - 1}${word & NEXT ? "+" : ""}</code></td><td>${escape(cause(i, w))}</td></tr>`);
  }
  const boxes = [...regions(r)].map(([b, a, r0, r1, c0, c1, x, copy]) => {
    const by = x ? ` <small>by ${meta.indexes[x]}</small>` : "", own = copy === -1 || copy === rankOfLane(lane[i]);
    const to = own ? "" : ` <small>at ${meta.copies[copy] ?? `rank ${copy}`}</small>`;
    const tile = `${meta.buffers[b]}[${r0}:${r1},${c0}:${c1}]`;
    return `<tr><td>${meta.accesses[a]} <code>${meta.buffers[b]}</code></td><td><button class="link" data-find="${tile}" title="Find what touches it"><code>${r0}:${r1}, ${c0}:${c1}</code></button>${by}${to}</td></tr>`;
  });
  const named = (j) => `${meta.kinds[kind[j]]}${role[j] ? `, ${meta.roles[role[j]]}` : ""}`;
  const parts = siblings(i).filter((j) => j !== i).map((j) => `<tr><td>${link(j, named(j))}</td><td>${time(length[j])}</td></tr>`);
  const after = [];
  for (let j = 0; j < count; j++) if (releaser[j] === i) after.push(j);
  const released = after.slice(0, 8).map((j) => `<tr><td>${laneName(lane[j])}</td><td>${link(j, phaseOf(j).name)}</td></tr>`);
  if (after.length > 8) released.push(`<tr><td></td><td>${after.length - 8} more</td></tr>`);
  const section = (title, content) => (content.length ? `<h2>${title}</h2><table>${content.join("")}</table>` : "");
  panel.innerHTML = `<h3><i class="swatch" style="background:${colours.shade[shadeOf[i]]}"></i>${escape(phase.name)}</h3>
    <p>${named(i)} · ${place(i)} · ${laneName(lane[i])} · ${family}</p><table>${lines.join("")}</table>
    ${usual?.median ? histogram(usual, length[i]) : ""}${section("Operands", operandRows)}${section("Waits for", waits)}${section("Same instruction", parts)}
    ${section("Released", released)}${section("Regions (rows, columns)", boxes)}
    <h2>Meaning</h2>${phase.meaning.map((text) => `<p><code>${escape(text)}</code></p>`).join("")}`;
  document.querySelector("aside").scrollTop = 0;
}

/** What happened between two moments: shares of all workers' time, and the resources' mean rates. */
function measured() {
  const panel = $("measured");
  panel.hidden = !measure || measure.a === measure.b;
  if (panel.hidden) return;
  const a = Math.min(measure.a, measure.b), b = Math.max(measure.a, measure.b);
  panel.innerHTML = `<h3>${time(b - a, 4)}</h3><p>from ${time(a, 6)} to ${time(b, 6)}</p>` + sources.map((s) => {
    const sums = new Float64Array(PARTS), to = s.lane0 + s.ranks * s.workers, all = (b - a) * (to - s.lane0);
    for (let l = s.lane0; l < to; l++) {
      for (let n = firstReaching(pieceEnd, pieceStart[l], pieceStart[l + 1], a); n < pieceStart[l + 1] && pieceBegin[n] < b; n++) {
        sums[partOf(pieceOf[n])] += Math.max(0, Math.min(pieceEnd[n], b) - Math.max(pieceBegin[n], a));
      }
    }
    const parts = [...sums].map((v, p) => [v / all, p]).filter(([v]) => v > 0.0005).sort((x, y) => y[0] - x[0]);
    const shares = parts.map(([v, p]) => bar(partName(p), percent(v), [[v, p === WAITING ? colours.wait : colours.shade[p]]]));
    const rates = tracks.map(({ r, name }) => { const v = meanRate(s, r, a, b); return bar(name, `${rate(v * s.resources[r].peak, s.resources[r].unit)} · ${percent(v)}`, [[v, colours.curve]]); });
    return `<h2>${s.letter} share of the workers' time</h2><div class="bars">${shares.join("")}</div><h2>${s.letter} resources, of peak</h2><div class="bars">${rates.join("")}</div>`;
  }).join("");
}

function tooltip(x, y, row, track = -1, line = undefined) {
  const tip = $("tooltip"), at = x * size.k;
  const text = hovered >= 0 ? aboutInterval(hovered) : track >= 0 ? describeTrack(track, at) : line ? aboutBlock(line, at) : row ? aboutColumn(row, at) : "";
  tip.hidden = !text;
  if (!text) return;
  tip.innerHTML = text;
  const w = canvas.clientWidth, right = x + 16 + tip.offsetWidth > w;
  tip.style.left = `${right ? Math.max(0, x - tip.offsetWidth - 12) : x + 16}px`;
  tip.style.top = `${Math.max(0, Math.min(y + 18, canvas.clientHeight - tip.offsetHeight - 4))}px`;
}
function aboutInterval(i) {
  const values = operands(record[i]).map(([n, v]) => `${n} ${v}`).join(", ");
  const first = isWait(i) ? `${phaseOf(i).name} ${label(i)}` : label(i);
  return `<b>${escape(first)}</b> &nbsp;${time(length[i])}<small>${place(i)} · ${laneName(lane[i])}${role[i] ? ` · ${meta.roles[role[i]]}` : ""}${values ? ` · ${escape(values)}` : ""}</small>`;
}
/** The tooltip of a layer, or of a phase in a layer. */
function aboutBlock(line, x) {
  const block = blockAt(line, toTime(x));
  return block ? `<b>${block.name}</b> ${line.shade < 0 ? "" : escape(meta.phases[line.shade].name)} ${time(block.t1 - block.t0)}<small>from ${time(block.t0 - line.s.shift, 6)} to ${time(block.t1 - line.s.shift, 6)}</small>` : "";
}
/** The tooltip of a rank: what its workers do in one column of pixels. */
function aboutColumn(row, x) {
  const workers = row.lane1 - row.lane0;
  if (x < gutter() || row.type !== "rank") return "";
  const { sums } = rowShare(row, new Share(1), toTime(x), scale(), false);
  const parts = [...sums].map((v, p) => [v / workers, p]).filter(([v]) => v > 0.005).sort((a, b) => b[0] - a[0]).slice(0, 6);
  return `<b>${row.text}</b> at ${time(toTime(x), 6)}${parts.map(([v, p]) => `<small>${percent(v)} ${partName(p)}</small>`).join("")}`;
}
