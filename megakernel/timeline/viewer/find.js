// Finding and filtering: which intervals match a text, which are dimmed, which are hidden.

let matches = null, matchFlags = null;
const hidden = new Set(); // shades by number, "wait", "load"
const partHidden = (p) => hidden.has(p === WAITING ? "wait" : p);
const hiddenAt = (i) => hidden.has(shapeOf[i] === SHAPE.wait ? "wait" : shapeOf[i] === SHAPE.load ? "load" : shadeOf[i]);
const filtering = () => matchFlags !== null || showPath;
function dimmed(i) {
  return (matchFlags !== null && !matchFlags[i]) || (showPath && !onPath[i]);
}

const PLACES = {
  layer: (i, v) => place(i) === `layer ${v}` || place(i) === v,
  worker: (i, v) => workerOfLane(lane[i]) === Number(v),
  rank: (i, v) => rankOfLane(lane[i]) === Number(v),
  role: (i, v) => meta.roles[role[i]].startsWith(v),
  kind: (i, v) => meta.kinds[kind[i]].startsWith(v),
  trace: (i, v) => sourceOfLane(lane[i]).letter.toLowerCase() === v,
};
const READS = meta.accesses.map((a) => a !== "write"), WRITES = meta.accesses.map((a) => a !== "read");
/**
 * A test of a record: part of a name, `name=value` of an operand, `buffer=`, `reads=` or `writes=` a buffer, or
 * BUFFER[row], BUFFER[row,col] or BUFFER[row:row_end, ..], which asks for regions that touch the tile.
 */
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

/** Dim all that does not match; returns how many instructions match. */
function find(text) {
  const words = text.toLowerCase().split(/\s+(?![^[]*\])/).map((w) => w.replace(/\s+/g, "")).filter(Boolean);
  matches = matchFlags = null;
  if (words.length) {
    const places = [], tests = [];
    for (const word of words) {
      const [name, value] = word.split("=");
      if (value !== undefined && PLACES[name]) places.push((i) => PLACES[name](i, value)); else tests.push(recordTest(word));
    }
    const flags = new Uint8Array(records.length / WORDS);
    for (let r = 0; r < flags.length; r++) flags[r] = tests.every((t) => t(r)) ? 1 : 0;
    matchFlags = new Uint8Array(count);
    matches = [];
    for (let i = 0; i < count; i++) {
      if (!flags[record[i]] || !places.every((t) => t(i))) continue;
      matchFlags[i] = 1;
      if (kind[i] === COMPUTE || words.some((w) => w.startsWith("kind="))) matches.push(i);
    }
    matches.sort((a, b) => begin[a] - begin[b]);
  }
  $("matches").textContent = matches ? matches.length : "";
  forgetBins();
  request();
  return matches ? matches.length : 0;
}
function stepMatch(by) {
  if (!matches || !matches.length) return;
  const at = matches.indexOf(selected);
  choose(matches[at < 0 ? (by > 0 ? 0 : matches.length - 1) : (at + by + matches.length) % matches.length]);
}

// -- relatives of an interval
/** Intervals of the same executed instruction, which one worker ran. */
function siblings(i) {
  const found = [], own = instanceOf(i), l = lane[i];
  for (let n = groupStart[l * ROLES]; n < groupStart[(l + 1) * ROLES]; n++) if (instanceOf(order[n]) === own) found.push(order[n]);
  return found.sort((a, b) => begin[a] - begin[b]);
}
const waitOf = (i) => siblings(i).filter((j) => kind[j] === COUNTER_WAIT).pop() ?? -1;
