// Keeps drawing fast in long traces. The time of a lane (one worker) is cut into pieces that do not overlap. A row with
// many pieces is not drawn piece by piece: their times are summed over bins of time in advance, for several bin widths.

// A worker has several warps, so its intervals may overlap. A piece then shows the one whose state comes first in State
// of megakernel/timeline/states.py, which cuts the pieces. A piece is an interval or a part of one.
const { pieceStart, pieceOf } = data;
const pieceBegin = Float64Array.from(pieceOf, (i, n) => begin[i] + data.pieceAfter[n]);
const pieceEnd = Float64Array.from(pieceOf, (i, n) => endOf(i) - data.pieceBefore[n]);
const piecePart = Uint8Array.from(pieceOf, partOf), pieceWhole = Uint32Array.from(pieceOf, (i) => length[i]); // pieceWhole: the interval's length

// -- bins
const FINEST = 16384, COARSEST = 1024;
const pyramids = new Map();
const forgetBins = () => pyramids.clear();

// Sums up how much time each part (a phase, or waiting) takes in each column of pixels. A range of time may cover many
// whole columns. To be fast, it is then only noted in `changes`: +1 at the first whole column, -1 after the last one.
// At the end, `settle` adds the running totals of `changes` to the sums. Parts that are not `touched` have sums of 0.
class Share {
  constructor(columns) {
    this.columns = columns;
    this.sums = new Float32Array(PARTS * columns);
    this.changes = new Float32Array(PARTS * (columns + 1));
    this.touched = new Uint8Array(PARTS);
    this.spread = new Uint8Array(PARTS); // 1 if `changes` has entries for the part
  }
  clear() {
    for (const p of this.parts()) {
      this.sums.fill(0, p * this.columns, (p + 1) * this.columns);
      if (this.spread[p]) this.changes.fill(0, p * (this.columns + 1), (p + 1) * (this.columns + 1));
    }
    this.touched.fill(0); this.spread.fill(0);
  }
  parts() {
    const found = [];
    for (let p = 0; p < PARTS; p++) if (this.touched[p]) found.push(p);
    return found;
  }
  /** Add the range [x0, x1), in units of columns: each column gets the fraction of it that the range covers. */
  add(part, x0, x1) {
    if (x0 < 0) x0 = 0;
    if (x1 > this.columns) x1 = this.columns;
    if (x1 <= x0) return;
    this.touched[part] = 1;
    const first = Math.floor(x0), last = Math.floor(x1), at = part * this.columns;
    if (first === last) { this.sums[at + first] += x1 - x0; return; }
    this.sums[at + first] += first + 1 - x0;
    if (last < this.columns) this.sums[at + last] += x1 - last;
    if (last === first + 2) this.sums[at + first + 1] += 1;
    else if (last > first + 2) {
      this.spread[part] = 1;
      this.changes[at + part + first + 1] += 1;
      this.changes[at + part + last] -= 1;
    }
  }
  settle() {
    for (const p of this.parts()) {
      if (!this.spread[p]) continue;
      let whole = 0;
      for (let c = 0, at = p * this.columns; c < this.columns; c++) {
        whole += this.changes[at + p + c];
        this.sums[at + c] += whole;
      }
    }
    return this;
  }
}

/** A row's time per bin and part (phase or waiting), without dimmed intervals, for several numbers of bins (levels). */
function makePyramid(row) {
  let bins = COARSEST;
  while (bins < FINEST && bins < piecesIn(row) / 2) bins *= 2;
  const share = new Share(bins), scale = bins / meta.span;
  for (let n = pieceStart[row.lane0]; n < pieceStart[row.lane1]; n++) {
    if (!dimmed(pieceOf[n])) share.add(piecePart[n], pieceBegin[n] * scale, pieceEnd[n] * scale);
  }
  let { sums } = share.settle();
  const parts = share.parts();
  const levels = [{ bins, sums }];
  while (bins > COARSEST) {
    const half = new Float32Array((sums.length / 2));
    for (const p of parts) for (let b = 0; b < bins; b++) half[(p * bins + b) >> 1] += sums[p * bins + b] / 2;
    sums = half;
    levels.push({ bins: (bins /= 2), sums });
  }
  return { parts, levels };
}
const piecesIn = (row) => pieceStart[row.lane1] - pieceStart[row.lane0];

// Adds the times of a row's intervals, from time t0 on, to `share`, and returns its finished sums, one per column of
// pixels. `px` is the number of columns per unit of time. If `narrow`, only intervals below two columns count: wider
// ones are drawn singly.
function rowShare(row, share, t0, px, narrow) {
  if (piecesIn(row) > 4 * share.columns) {
    const { levels, parts } = remembered(pyramids, row.key, () => makePyramid(row));
    // Take the widest bins that are no wider than a column. If all are wider, few pieces are visible: add them singly.
    const level = levels.findLast((x) => meta.span / x.bins <= 1 / px);
    if (level) { addBins(share, level, parts, t0, px); return share.settle(); }
  }
  addPieces(row, share, t0, t0 + share.columns / px, px, narrow ? 2 / px : Infinity, filtering());
  return share.settle();
}
/** Add the pieces of a row that are shorter than `widest` and that overlap [t0, t1); if `some`, only those not dimmed. */
function addPieces(row, share, t0, t1, px, widest = Infinity, some = false) {
  // Local variables are faster, because the browser looks up a global variable again in each iteration.
  const starts = pieceStart, begins = pieceBegin, ends = pieceEnd, parts = piecePart, whole = pieceWhole, of = pieceOf;
  for (let l = row.lane0; l < row.lane1; l++) {
    const end = starts[l + 1];
    for (let n = firstReaching(ends, starts[l], end, t0); n < end; n++) {
      const from = begins[n];
      if (from > t1) break;
      if (whole[n] < widest && !(some && dimmed(of[n]))) share.add(parts[n], (from - t0) * px, (ends[n] - t0) * px);
    }
  }
}
function addBins(share, { bins, sums }, parts, t0, px) {
  const { columns } = share, each = meta.span / bins, width = each * px;
  const from = Math.max(0, Math.floor(t0 / each)), to = Math.min(bins, Math.ceil((t0 + columns / px) / each));
  for (const p of parts) {
    share.touched[p] = 1;
    for (let b = from, at = p * columns; b < to; b++) {
      const sum = sums[p * bins + b];
      if (!sum) continue;
      // The bin is no wider than a column, so it lies in one column or in two.
      const x = (b * each - t0) * px, column = Math.floor(x), inside = Math.min(column + 1 - x, width), rest = width - inside;
      if (column >= 0 && column < columns) share.sums[at + column] += sum * inside;
      if (rest > 0 && column + 1 < columns) share.sums[at + column + 1] += sum * rest;
    }
  }
}
