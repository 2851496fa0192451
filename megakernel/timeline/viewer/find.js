// Search and filters: which intervals match a text, which are dimmed, and which are hidden.

let matchFlags = null, matchCount = 0; // flag per interval: 0, MATCH, or STOP (a match to which n and N step)
const MATCH = 1, STOP = 2;
const hidden = new Set(); // what the user has hidden: numbers of shades, "wait", "load"
const partHidden = (p) => hidden.has(p === WAITING ? "wait" : p);
const hiddenAt = (i) => hidden.has(shapeOf[i] === SHAPE.wait ? "wait" : shapeOf[i] === SHAPE.load ? "load" : shadeOf[i]);
const filtering = () => matchFlags !== null || showPath;
const dimmed = (i) => (matchFlags !== null && !matchFlags[i]) || (showPath && !onPath[i]);

// Each function below turns the value of a search term into a test of intervals. There are many intervals but few lanes
// and names. So the result for each lane or name is computed once and kept in a list.
const chosen = (many, test) => Uint8Array.from({ length: many }, (_, n) => (test(n) ? 1 : 0));
const ofLanes = (test) => { const some = chosen(lanes, test); return (i) => some[lane[i]]; };
const named = (names, column, v) => { const some = chosen(names.length, (n) => names[n].startsWith(v)); return (i) => some[column[i]]; };
const PLACES = {
  layer: (v) => { const wanted = { prologue: PROLOGUE, epilogue: EPILOGUE }[v] ?? Number(v); return (i) => layer[i] === wanted; },
  worker: (v) => ofLanes((l) => workerOfLane(l) === Number(v)),
  rank: (v) => ofLanes((l) => rankOfLane(l) === Number(v)),
  role: (v) => named(meta.roles, role, v),
  kind: (v) => named(meta.kinds, kind, v),
  trace: (v) => ofLanes((l) => sourceOfLane(l).letter.toLowerCase() === v),
};
const READS = meta.accesses.map((a) => a !== "write"), WRITES = meta.accesses.map((a) => a !== "read");
// Turns a word of a search into a test of instruction records. A word is a part of the phase's name; `operand=value`;
// `buffer=`, `reads=` or `writes=` with a buffer; or a tile BUFFER[row], BUFFER[row,col] or BUFFER[row:row_end, ..]
// that the instruction must access in part.
function recordTest(word) {
  const tile = /^(\w+)\[(\d*)(?::(\d+))?(?:,(\d+)(?::(\d+))?)?\]$/.exec(word);
  if (tile) {
    const [, name, r0, r1, c0, c1] = tile, buffer = bufferNumber(name);
    const span = (from, to) => (from ? [Number(from), to ? Number(to) : Number(from) + 1] : [0, Infinity]);
    const [row, rowEnd] = span(r0, r1), [col, colEnd] = span(c0, c1);
    return (r) => touches(r, ([b, , top, bottom, left, right]) => b === buffer && top < rowEnd && bottom > row && left < colEnd && right > col);
  }
  const [name, value] = word.split("=");
  if (value === undefined) return (r) => meta.phases[records[r * WORDS]].name.includes(word);
  const allowed = { buffer: () => true, reads: (a) => READS[a], writes: (a) => WRITES[a] }[name];
  if (allowed) {
    const buffer = bufferNumber(value);
    return (r) => touches(r, ([b, access]) => b === buffer && allowed(access));
  }
  return (r) => operands(r).some(([n, v]) => n === name && String(v) === value);
}
const bufferNumber = (name) => meta.buffers.findIndex((b) => b.toLowerCase() === name);
function touches(r, test) {
  for (const region of regions(r)) if (test(region)) return true;
  return false;
}

/** Dim all intervals that do not match. Returns how many instructions match, or with `kind=`, how many intervals. */
function find(text) {
  const words = text.toLowerCase().split(/\s+(?![^[]*\])/).map((w) => w.replace(/\s+/g, "")).filter(Boolean);
  matchFlags = null;
  matchCount = 0;
  if (words.length) {
    const places = [], tests = [];
    for (const word of words) {
      const [name, value] = word.split("=");
      if (value !== undefined && PLACES[name]) places.push(PLACES[name](value)); else tests.push(recordTest(word));
    }
    const flags = new Uint8Array(records.length / WORDS);
    for (let r = 0; r < flags.length; r++) flags[r] = tests.every((t) => t(r)) ? 1 : 0;
    const found = new Uint8Array(count), kinds = words.some((w) => w.startsWith("kind="));
    const of = record, what = kind; // local names are faster, as in addPieces
    let stops = 0;
    for (let i = 0; i < found.length; i++) {
      if (!flags[of[i]] || !places.every((t) => t(i))) continue;
      const stop = kinds || what[i] === COMPUTE;
      found[i] = stop ? STOP : MATCH;
      if (stop) stops++;
    }
    matchFlags = found;
    matchCount = stops;
  }
  $("matches").textContent = matchFlags ? matchCount : "";
  forgetBins();
  request();
  return matchCount;
}
/** Select the next match (by = 1) or the previous one (by = -1) in order of begin, and wrap around at the end. */
function stepMatch(by) {
  if (!matchCount) return;
  const later = (a, b) => a >= 0 && (b < 0 || (begin[a] - begin[b] || a - b) * by > 0);
  let next = -1, first = -1;
  for (let i = 0; i < count; i++) {
    if (matchFlags[i] !== STOP) continue;
    if (first < 0 || later(first, i)) first = i;
    if (selected >= 0 && i !== selected && later(i, selected) && (next < 0 || later(next, i))) next = i;
  }
  choose(next < 0 ? first : next);
}

// -- finding intervals of the same instruction
/** All intervals of the instruction that interval i belongs to. One worker ran them. */
function siblings(i) {
  const found = [], own = instanceOf(i), l = lane[i];
  for (let n = groupStart[l * ROLES]; n < groupStart[(l + 1) * ROLES]; n++) if (instanceOf(order[n]) === own) found.push(order[n]);
  return found.sort((a, b) => begin[a] - begin[b]);
}
/** Interval i if it is a wait, otherwise the last counter wait of its instruction, or -1. */
const waitOf = (i) => (isWait(i) ? i : siblings(i).filter((j) => kind[j] === COUNTER_WAIT).pop() ?? -1);
