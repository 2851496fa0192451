// The data of the traces, as arrays with an element for each interval or instruction record. All scripts read them
// here.

const $ = (id) => document.getElementById(id);
const meta = JSON.parse($("meta").textContent);
const data = await unpack($("data").textContent, meta.columns);
$("data").remove();

const { words: WORDS, operand: OPERAND, wait: WAIT_AT, waits: WAITS, next: NEXT, counter: COUNTER, prologue: PROLOGUE, epilogue: EPILOGUE } = meta.layout;
const [FETCH, PAGE_WAIT, COUNTER_WAIT, LOAD, COMPUTE, STORE] = ["fetch", "page wait", "counter wait", "load", "compute", "store"].map((k) => meta.kinds.indexOf(k));
const ROLES = meta.roles.length, STORER = meta.roles.indexOf("storer"), CONSUMER = meta.roles.indexOf("consumer");

const { length, record, releaser, twin, records, lane, layer, launch, kind, slot, role } = data;
const begin = Float64Array.from(data.begin); // shifted if two traces are aligned
const count = begin.length;

// -- The page shows one trace, or two traces to compare.
const sources = meta.sources;
let lanes = 0;
{
  let first = 0, curve = 0;
  sources.forEach((s, n) => {
    const { source, machine, ranks, workers, intervals } = s.summary;
    Object.assign(s, { source, machine, ranks, workers, intervals, lane0: lanes, first, curve, shift: 0, letter: sources.length > 1 ? "AB"[n] : "" });
    lanes += s.ranks * s.workers;
    first += s.intervals;
    curve += s.ranks * meta.resources.length * s.bins;
  });
}
const sourceOfLane = (l) => (sources.length > 1 && l >= sources[1].lane0 ? sources[1] : sources[0]);
const rankOfLane = (l) => { const s = sourceOfLane(l); return Math.floor((l - s.lane0) / s.workers); };
const workerOfLane = (l) => { const s = sourceOfLane(l); return (l - s.lane0) % s.workers; };

// -- an interval
const phaseOf = (i) => meta.phases[shadeOf[i]];
const endOf = (i) => begin[i] + length[i];
const isWait = (i) => kind[i] === COUNTER_WAIT || kind[i] === PAGE_WAIT;
// How an interval is drawn. A thread block has one warp, the storer, that copies results to memory while the other
// warps go on computing. So the storer's STORE intervals are drawn as thin strips, like loads.
const SHAPE = { wait: 0, load: 1, work: 2, store: 3 };
// Each phase, such as the QKV projection, has its own shade of colour, numbered as in `meta.phases`. Phases of one
// family (kind of operation) have the same hue and differ in lightness.
const shapeOf = new Uint8Array(count), shadeOf = new Uint8Array(count);
for (let i = 0; i < count; i++) {
  shadeOf[i] = records[record[i] * WORDS];
  const k = kind[i];
  shapeOf[i] = isWait(i) ? SHAPE.wait : k === LOAD || k === FETCH ? SHAPE.load
    : k === STORE && role[i] === STORER ? SHAPE.store : SHAPE.work;
}
// A column of pixels may stand for many short intervals, so it has parts: one for each phase, and one for waiting.
const PARTS = meta.phases.length + 1, WAITING = meta.phases.length;
const partOf = (i) => (shapeOf[i] === SHAPE.wait ? WAITING : shadeOf[i]);
const partName = (p) => (p === WAITING ? "waiting" : meta.phases[p].name);

/** The number of the executed instruction that interval i belongs to. */
const instanceOf = (i) => (launch[i] * 65536 + layer[i]) * (records.length / WORDS) + record[i];

// -- text
function scaled(value, steps, digits = 3) {
  const size = Math.abs(value), [scale, name] = steps.find(([s]) => size >= s) ?? steps[steps.length - 1];
  const shown = value / scale;
  return `${Math.abs(shown) >= 1000 ? shown.toFixed(0) : Number(shown.toPrecision(digits))} ${name}`;
}
const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]], MANY = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const seconds = (s, digits) => (s === 0 ? "0 s" : scaled(s, SECONDS, digits));
const time = (units, digits) => seconds(units * meta.unit_s, digits);
const rate = (value, unit) => scaled(value, MANY) + unit;
const percent = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)} %`);
const place = (i) => (layer[i] === PROLOGUE ? "prologue" : layer[i] === EPILOGUE ? "epilogue" : `layer ${layer[i]}`);
function laneName(l) {
  const s = sourceOfLane(l), rank = s.ranks > 1 ? `rank ${rankOfLane(l)} · ` : "";
  return `${s.letter && `${s.letter} · `}${rank}worker ${workerOfLane(l)}`;
}
function cause(i, word = slot[i]) {
  const table = layer[i] === 0 ? data.causesFirst : data.causesLater;
  const found = table[record[i] * WAITS + word];
  if (found >= 0) return meta.causes[found];
  return kind[i] === COUNTER_WAIT && releaser[i] >= 0 ? phaseOf(releaser[i]).name : "a signal of no phase";
}
function label(i) {
  if (kind[i] === PAGE_WAIT) return "waits for a page";
  if (kind[i] === COUNTER_WAIT) return `waits for ${cause(i)}`;
  const { name } = phaseOf(i);
  return kind[i] === COMPUTE ? name : `${meta.kinds[kind[i]]} for ${name}`;
}
function operands(r) {
  return meta.phases[records[r * WORDS]].operands.map((name, k) => [name, records[r * WORDS + OPERAND + k]]);
}
/** The regions that record r reads or writes, 8 numbers each: buffer, access kind, row range, column range, index, rank. */
function* regions(r) {
  for (let n = data.regionStart[r]; n < data.regionStart[r + 1]; n++) yield data.regions.subarray(n * 8, n * 8 + 8);
}

/** Decode columns, which are compressed with deflate and written in base64, into typed arrays. */
async function unpack(text, columns) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const types = { u4: Uint32Array, i4: Int32Array, u2: Uint16Array, i2: Int16Array, u1: Uint8Array };
  const result = {};
  let offset = 0;
  for (const [name, type, size] of columns) {
    result[name] = new types[type](buffer, offset, size);
    offset += size * types[type].BYTES_PER_ELEMENT;
  }
  return result;
}
