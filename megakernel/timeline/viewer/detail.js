// Level of detail. Time of a lane is cut into pieces that do not overlap; rows with many pieces keep sums of them in bins
// of halving width. A frame then costs what is visible, never what exists.

// -- pieces: work; a storer's stores where there is no work; waits where there is neither
let pieceStart, pieceBegin, pieceEnd, pieceOf;
function cutPieces() {
  pieceStart = new Uint32Array(lanes + 1);
  const b = [], e = [], of = [];
  const byBegin = (x, y) => begin[x] - begin[y];
  for (let l = 0; l < lanes; l++) {
    const shapes = [[], [], [], []];
    const roles = rolesOf(l);
    for (const r of roles) {
      for (let n = groupStart[l * ROLES + r]; n < groupStart[l * ROLES + r + 1]; n++) shapes[shapeOf[order[n]]].push(order[n]);
    }
    if (roles.length > 1) for (const list of shapes) list.sort(byBegin);
    const found = [];
    let taken = [];
    for (const shape of [SHAPE.work, SHAPE.store, SHAPE.wait]) {
      const own = [];
      let at = 0, last = -Infinity;
      for (const i of shapes[shape]) {
        let t = Math.max(begin[i], last);
        const end = endOf(i);
        last = Math.max(last, end);
        while (at < taken.length && taken[at + 1] <= t) at += 2;
        for (let n = at; t < end; n += 2) {
          const stop = n < taken.length ? Math.min(end, Math.max(taken[n], t)) : end;
          if (stop > t) { found.push([t, stop, i]); own.push(t, stop); }
          t = n < taken.length ? Math.max(stop, taken[n + 1]) : end;
        }
      }
      taken = taken.length ? merged(taken, own) : own;
    }
    if (shapes[SHAPE.wait].length || shapes[SHAPE.store].length) found.sort((x, y) => x[0] - y[0]);
    for (const [t, stop, i] of found) { b.push(t); e.push(stop); of.push(i); }
    pieceStart[l + 1] = b.length;
  }
  pieceBegin = Float64Array.from(b); pieceEnd = Float64Array.from(e); pieceOf = Uint32Array.from(of);
}
/** Two sorted lists of disjoint [begin, end, begin, end, ..] in one. */
function merged(a, b) {
  const out = [];
  for (let m = 0, n = 0; m < a.length || n < b.length; ) {
    const [t, stop] = n >= b.length || (m < a.length && a[m] <= b[n]) ? [a[m], a[(m += 2) - 1]] : [b[n], b[(n += 2) - 1]];
    if (out.length && t <= out[out.length - 1]) out[out.length - 1] = Math.max(out[out.length - 1], stop);
    else out.push(t, stop);
  }
  return out;
}
cutPieces();

// -- bins
const FINEST = 16384, COARSEST = 1024;
let pyramids = new Map();
const forgetBins = () => { pyramids = new Map(); };

/** Sums per bin and part of a row's time, in levels of halving bins; only of intervals that are not dimmed. */
function pyramid(row) {
  let found = pyramids.get(row.key);
  if (found) return found;
  let bins = COARSEST;
  while (bins < FINEST && bins < piecesIn(row) / 2) bins *= 2;
  let sums = new Float32Array(bins * PARTS);
  const scale = bins / meta.span;
  for (let l = row.lane0; l < row.lane1; l++) {
    for (let n = pieceStart[l]; n < pieceStart[l + 1]; n++) {
      if (!dimmed(pieceOf[n])) addShare(sums, partOf(pieceOf[n]), pieceBegin[n] * scale, pieceEnd[n] * scale, 0, bins);
    }
  }
  found = { levels: [{ bins, sums }] };
  while (bins > COARSEST) {
    const half = new Float32Array((bins / 2) * PARTS);
    for (let b = 0; b < bins; b++) for (let p = 0; p < PARTS; p++) half[(b >> 1) * PARTS + p] += sums[b * PARTS + p] / 2;
    sums = half;
    found.levels.push({ bins: (bins /= 2), sums });
  }
  pyramids.set(row.key, found);
  return found;
}
const piecesIn = (row) => pieceStart[row.lane1] - pieceStart[row.lane0];

// Parts that `addShare` and `addBins` met since the flags were cleared: most rows have few.
const touched = new Uint8Array(PARTS);
/** Add [x0, x1) to columns [low, high): to each the part of it that is covered. */
function addShare(share, part, x0, x1, low, high) {
  if (x0 < low) x0 = low;
  if (x1 > high) x1 = high;
  if (x1 <= x0) return;
  touched[part] = 1;
  const first = Math.floor(x0), last = Math.floor(x1);
  if (first === last) { share[first * PARTS + part] += x1 - x0; return; }
  share[first * PARTS + part] += first + 1 - x0;
  for (let x = first + 1; x < last; x++) share[x * PARTS + part] += 1;
  if (last < high) share[last * PARTS + part] += x1 - last;
}

/**
 * Fill `share` [columns, PARTS] with the row's time from t0 on, `px` columns per unit of time. `narrow` leaves out
 * intervals of two columns or more, which are drawn one by one. Returns whether there is anything.
 */
function rowShare(row, share, columns, t0, px, narrow) {
  const t1 = t0 + columns / px;
  if (piecesIn(row) > 4 * columns) {
    const { levels } = pyramid(row);
    // The coarsest level whose bins are no wider than a column; when all are wider, few pieces are left in sight.
    const level = [...levels].reverse().find((x) => meta.span / x.bins <= 1 / px);
    if (level) { addBins(share, level, columns, t0, px); return true; }
  }
  let any = false;
  for (let l = row.lane0; l < row.lane1; l++) {
    for (let n = firstReaching(pieceEnd, pieceStart[l], pieceStart[l + 1], t0); n < pieceStart[l + 1] && pieceBegin[n] <= t1; n++) {
      const i = pieceOf[n];
      if ((narrow && length[i] * px >= 2) || dimmed(i)) continue;
      addShare(share, partOf(i), (pieceBegin[n] - t0) * px, (pieceEnd[n] - t0) * px, 0, columns);
      any = true;
    }
  }
  return any;
}
function addBins(share, { bins, sums }, columns, t0, px) {
  const width = (meta.span / bins) * px, first = Math.max(0, Math.floor((t0 / meta.span) * bins));
  for (let b = first; b < bins; b++) {
    const x = ((b * meta.span) / bins - t0) * px;
    if (x >= columns) break;
    // A bin no wider than a column lies in one or two of them.
    const column = Math.floor(x), inside = Math.min(1, (column + 1 - x) / width) * width, rest = width - inside;
    for (let p = 0; p < PARTS; p++) {
      const sum = sums[b * PARTS + p];
      if (!sum) continue;
      touched[p] = 1;
      if (column >= 0) share[column * PARTS + p] += sum * inside;
      if (rest > 0 && column + 1 < columns) share[(column + 1) * PARTS + p] += sum * rest;
    }
  }
}
