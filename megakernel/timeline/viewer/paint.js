// Draws one frame. Bars and columns are written directly into an array of pixels; text and lines are drawn on top.

const canvas = $("canvas"), ctx = canvas.getContext("2d");
const view = { t0: 0, t1: meta.span, scroll: 0 };
let stuck = null, stuckY = 0; // stuck: the header of the first visible row; it stays at the top while the row scrolls
let size = { w: 1, h: 1, k: 1 }, base = null, colours = {}, queued = false;

// -- geometry, in device pixels
const gutter = () => Math.min(124 * size.k, size.w / 4), rulerTop = () => 48 * size.k, layersTop = () => 74 * size.k;
const curvesTop = () => layersTop() + layersHeight();
const rowsTop = () => curvesTop() + curvesHeight() + 4 * size.k;
const rowY = (r) => rowsTop() + (r === stuck ? stuckY : r.y - view.scroll);
const scale = () => (size.w - gutter()) / (view.t1 - view.t0);
const toX = (t) => gutter() + (t - view.t0) * scale();
const toTime = (x) => view.t0 + (x - gutter()) / scale();
const relay = () => { layRows(size.h - rowsTop() - 6 * size.k, size.k); scrollRows(0); request(); };
/** A row's boxes, relative to its top: one for work and waits, a strip above it for stores, one below it for loads. */
function boxes(row) {
  const k = size.k, gap = row.h >= 12 * k ? Math.max(1, Math.round(row.h * 0.08)) : row.h > 3 ? 1 : 0;
  const roomy = row.type === "worker" && !row.isOpen && row.h >= 24 * k, strip = roomy ? Math.round(Math.min(row.h * 0.14, 7 * k)) : 0;
  const storing = strip && groupStart[row.lane0 * ROLES + STORER + 1] > groupStart[row.lane0 * ROLES + STORER] ? strip : 0;
  const under = strip ? strip + Math.round(k) : 0, over = storing ? storing + Math.round(k) : 0;
  return { y: gap + over, h: row.h - 2 * gap - under - over, strip, storeY: gap, loadY: row.h - gap - strip };
}
/** The rectangle of interval i on the canvas, and its row. */
function barBox(i) {
  const row = rowOf(i), box = boxes(row), y = Math.round(rowY(row)), shape = shapeOf[i];
  const x0 = Math.max(toX(begin[i]), gutter() - 4), x1 = Math.min(toX(endOf(i)), size.w + 4);
  const at = { x: x0, w: Math.max(x1 - x0, 1), y: y + box.y, h: box.h, row };
  if (row.type === "worker" && box.strip) {
    if (shape === SHAPE.load) Object.assign(at, { y: y + box.loadY, h: box.strip });
    if (shape === SHAPE.store) Object.assign(at, { y: y + box.storeY, h: box.strip });
  }
  return at;
}

function request() {
  if (!queued) { queued = true; requestAnimationFrame(draw); }
}
function draw() {
  queued = false;
  base.pixels.fill(colours.page32);
  const shown = visibleRows(), labelled = [];
  paintGrid(shown);
  paintLayers();
  paintCurves();
  for (const row of shown) paintRow(row, labelled);
  const top = stuck ? rowY(stuck) + stuck.h : rowsTop();
  if (stuck) {
    fill(gutter(), rowY(stuck), size.w, top, colours.panel32);
    paintRow(stuck, labelled);
  }
  ctx.putImageData(base.image, 0, 0);
  ctx.save();
  ctx.beginPath(); ctx.rect(gutter(), top, size.w - gutter(), size.h - top); ctx.clip();
  for (const bar of labelled) drawText(bar.i, bar);
  drawOverlay();
  unclip();
  drawRowLabels(stuck ? [stuck, ...shown] : shown);
  drawLayerLabels();
  drawCurveLabels();
  drawRuler();
  drawOverview();
  drawMeasure();
}
function visibleRows() {
  const found = [], end = view.scroll + size.h - rowsTop(), first = rowAt(view.scroll);
  stuck = first?.header ?? (first?.end && first.y < view.scroll ? first : null);
  if (stuck) stuckY = Math.min(0, stuck.end - view.scroll - stuck.h);
  for (let n = first?.n ?? rows.length; n < rows.length && rows[n].y < end; n++) if (rows[n] !== stuck) found.push(rows[n]);
  return found;
}

// -- pixels
/** Fill the rectangle [x0, x1) x [y0, y1), clipped to the area right of the labels and below `top`. */
function fill(x0, y0, x1, y1, colour, top = rowsTop()) {
  x0 = Math.max(Math.round(x0), Math.ceil(gutter())); x1 = Math.min(Math.round(x1), size.w);
  y0 = Math.max(Math.round(y0), Math.ceil(top)); y1 = Math.min(Math.round(y1), size.h);
  if (x1 <= x0) return;
  const { pixels } = base, w = size.w, wide = x1 - x0;
  // Most bars are only a few pixels wide, and for these a call of `fill` per line would take longer than the loop.
  if (wide > 32) for (let y = y0; y < y1; y++) pixels.fill(colour, y * w + x0, y * w + x1);
  else for (let from = y0 * w + x0, end = y1 * w + x0; from < end; from += w) for (let at = from; at < from + wide; at++) pixels[at] = colour;
}
function hatch(x0, y0, x1, y1, dim) {
  x0 = Math.max(x0, Math.ceil(gutter())); x1 = Math.min(x1, size.w);
  y0 = Math.max(y0, Math.ceil(rowsTop())); y1 = Math.min(y1, size.h);
  const { pixels } = base, w = size.w, every = Math.round(7 * size.k), wide = Math.max(1, Math.round(size.k));
  const line = dim ? colours.dimmed32[WAITING] : colours.wait32, ground = dim ? colours.dimGround32 : colours.waitFill32;
  for (let y = y0; y < y1; y++) {
    for (let x = x0, m = (x + y) % every; x < x1; x++, m = m + 1 === every ? 0 : m + 1) pixels[y * w + x] = m < wide ? line : ground;
  }
}
function paintGrid(shown) {
  let bottom = rowsTop();
  for (const row of shown) {
    const y = rowY(row);
    const colour = row.type === "rank" ? colours.panel32 : row.n % 2 ? colours.stripe32 : colours.page32;
    if (colour !== colours.page32) fill(gutter(), y, size.w, y + row.h, colour);
    bottom = Math.max(bottom, y + row.h);
  }
  for (const t of ticks()) fill(toX(t), layersTop(), toX(t) + Math.max(1, size.k / 2), bottom, colours.line32, layersTop());
}

// A column is one pixel wide. In thin rows, of which many are visible at once, it is three pixels wide.
const THIN = 12, shares = new Map();
function shareOf(row) {
  const wide = row.h < THIN * size.k ? 3 : 1, columns = Math.ceil((size.w - Math.ceil(gutter())) / wide);
  let found = shares.get(wide);
  if (found?.columns !== columns) {
    found = Object.assign(new Share(columns), { wide, edges: new Float32Array(columns), units: new Float32Array(columns) });
    shares.set(wide, found);
  } else found.clear();
  return found;
}
function paintRow(row, labelled) {
  const box = boxes(row), y = Math.round(rowY(row)), share = shareOf(row);
  if (row.type === "role") { paintRole(row, share, y + box.y, box.h, labelled); return; }
  const single = row.type === "worker";
  paintColumns(rowShare(row, share, view.t0, scale() / share.wide, single), row.lane1 - row.lane0, y + box.y, box.h);
  if (single && longest[row.lane0] * scale() >= 2 * share.wide) paintBars(row, share.wide, y, box, labelled);
}
// Stack each column's sums from the bottom up. A column whose total is `whole` or more has the full height h.
function paintColumns(share, whole, y0, h) {
  const { sums, columns, wide, units, edges } = share, { pixels } = base, { w, h: height } = size, found = share.parts();
  if (!found.length) return;
  const left = Math.ceil(gutter()), top = Math.ceil(rowsTop()), bottom = y0 + h;
  units.fill(0); edges.fill(0);
  for (const p of found) for (let c = 0, at = p * columns; c < columns; c++) units[c] += sums[at + c];
  for (let c = 0; c < columns; c++) units[c] = h / (units[c] > whole ? units[c] : whole);
  for (const p of found) {
    if (partHidden(p)) continue;
    const colour = colours.part32[p];
    for (let c = 0, at = p * columns; c < columns; c++) {
      const part = sums[at + c];
      if (part < 1e-6) continue;
      let y = bottom - ((edges[c] + 0.5) | 0);
      edges[c] += part * units[c];
      let stop = bottom - ((edges[c] + 0.5) | 0);
      if (y > height) y = height;
      if (stop < top) stop = top;
      const x = left + c * wide, end = x + wide < w ? x + wide : w;
      for (let x32 = x; x32 < end; x32++) for (let at32 = stop * w + x32, last = y * w; at32 < last; at32 += w) pixels[at32] = colour;
    }
  }
}
/** Paint a worker's intervals of at least 2 * `columns` pixels. Work is painted last, so that nothing covers it. */
function paintBars(row, columns, y, box, labelled) {
  const least = 2 * columns, wide = wideIntervals(row.lane0, least), strips = { [SHAPE.load]: box.loadY, [SHAPE.store]: box.storeY };
  // If too many intervals are visible to be drawn one by one, the columns already show waits and stores.
  if (wide.few) paintPieces(row, least, y, box, labelled);
  for (const shape of box.strip ? [SHAPE.load, SHAPE.store] : []) {
    for (const i of wide[shape]) paintBar(i, y + strips[shape], box.strip, null);
  }
  for (const i of wide[SHAPE.work]) paintBar(i, y + box.y, box.h, labelled);
}
// Paint waits where no work covers them. Rows without strips also show stores; rows with strips, whole counter waits.
function paintPieces(row, least, y, box, labelled) {
  const l = row.lane0, px = scale();
  if (box.strip) for (const i of wideIntervals(l, least)[SHAPE.wait]) if (kind[i] === COUNTER_WAIT) paintBar(i, y + box.y, box.h, null);
  for (let n = firstReaching(pieceEnd, pieceStart[l], pieceStart[l + 1], view.t0); n < pieceStart[l + 1] && pieceBegin[n] <= view.t1; n++) {
    const i = pieceOf[n], shape = shapeOf[i];
    if (pieceWhole[n] * px < least || shape === SHAPE.work || (box.strip && shape === SHAPE.store)) continue;
    if (!box.strip || kind[i] === PAGE_WAIT) paintBar(i, y + box.y, box.h, labelled, pieceBegin[n], pieceEnd[n]);
    else if (!hiddenAt(i)) note(i, Math.round(toX(pieceBegin[n])), Math.round(toX(pieceEnd[n])), y + box.y, box.h, labelled);
  }
}
/** Add a bar to `labelled` if it has room for text. */
function note(i, x0, x1, y, h, labelled) {
  if (!dimmed(i) && x1 - Math.max(x0, gutter()) > 26 * size.k && h >= 11 * size.k) labelled.push({ i, x: x0, y, w: x1 - x0, h });
}
// Returns the visible intervals of lane l (a worker) that are at least `least` pixels wide, as one list per shape. If
// the lane has only `few` visible intervals, all of them are examined. Otherwise, most are narrow. Then it is faster to
// go through the lane's intervals from the longest on, and to stop at the first narrow one.
function wideIntervals(l, least) {
  const found = [[], [], [], []], px = scale(), { t0, t1 } = view;
  const ranges = [];
  let many = 0;
  for (let g = l * ROLES; g < (l + 1) * ROLES; g++) {
    const from = firstReaching(reach, groupStart[g], groupStart[g + 1], t0);
    const to = bisect(from, groupStart[g + 1], (n) => begin[order[n]] <= t1);
    ranges.push([from, to]);
    many += to - from;
  }
  found.few = many <= 4 * size.w;
  if (!found.few) {
    for (const i of longestFirst(l)) {
      if (length[i] * px < least) break;
      if (begin[i] <= t1 && endOf(i) >= t0) found[shapeOf[i]].push(i);
    }
    return found;
  }
  for (const [from, to] of ranges) {
    for (let n = from; n < to; n++) {
      const i = order[n];
      if (length[i] * px >= least && endOf(i) >= t0) found[shapeOf[i]].push(i);
    }
  }
  return found;
}
function paintRole(row, share, y, h, labelled) {
  const g = row.lane0 * ROLES + row.role, px = scale(), wide = [], column = px / share.wide;
  for (let n = firstReaching(reach, groupStart[g], groupStart[g + 1], view.t0); n < groupStart[g + 1]; n++) {
    const i = order[n];
    if (begin[i] > view.t1) break;
    if (length[i] * column >= 2) wide.push(i);
    else if (!dimmed(i)) share.add(partOf(i), (begin[i] - view.t0) * column, (endOf(i) - view.t0) * column);
  }
  paintColumns(share.settle(), 1, y, h);
  for (const i of wide) paintBar(i, y, h, labelled);
}
/** Paint interval i, or the part of it from t0 to t1. */
function paintBar(i, y, h, labelled, t0 = begin[i], t1 = endOf(i)) {
  if (hiddenAt(i)) return;
  const k = size.k, x0 = Math.round(toX(t0));
  let x1 = Math.max(Math.round(toX(t1)), x0 + 1);
  if (x1 - x0 > 4 * k) x1 -= Math.round(k);
  const faint = dimmed(i);
  if (shapeOf[i] === SHAPE.wait) {
    hatch(x0, y, x1, y + h, faint);
    if (x1 - x0 > 6 * k && h > 4 * k) frame(x0, y, x1, y + h, faint ? colours.dimmed32[WAITING] : colours.wait32);
  } else fill(x0, y, x1, y + h, faint ? colours.dimmed32[shadeOf[i]] : colours.part32[shadeOf[i]]);
  if (labelled) note(i, x0, x1, y, h, labelled);
}
function frame(x0, y0, x1, y1, colour) {
  const n = Math.max(1, Math.round(size.k));
  fill(x0, y0, x1, y0 + n, colour); fill(x0, y1 - n, x1, y1, colour);
  fill(x0, y0, x0 + n, y1, colour); fill(x1 - n, y0, x1, y1, colour);
}

/** The value of `known` at `key`; if it is missing, make and store it. */
function remembered(known, key, make) {
  if (known.size > 5000) known.clear();
  if (!known.has(key)) known.set(key, make(key));
  return known.get(key);
}
const longLists = new Map();
const longestFirst = (l) => remembered(longLists, l, () =>
  order.slice(groupStart[l * ROLES], groupStart[(l + 1) * ROLES]).sort((a, b) => length[b] - length[a]));
const longest = new Float64Array(lanes);
for (let i = 0; i < count; i++) longest[lane[i]] = Math.max(longest[lane[i]], length[i]);

// -- text of a bar. The font and the widths of texts in it are kept, because asking the canvas for them is slow.
let font = "", widths = null;
const widthsIn = new Map(), operandTexts = new Map();
function setFont(pixels, style = "") {
  const name = `${style}${Math.round(pixels)}px ${colours.sans}`;
  if (name === font) return;
  ctx.font = font = name;
  widths = remembered(widthsIn, font, () => new Map());
}
/** Restore the state from `ctx.save`. This may change the font, so the kept font is no longer valid. */
function unclip() { ctx.restore(); font = ""; }
const textWidth = (text) => remembered(widths, text, () => ctx.measureText(text).width);
const operandText = (row) => remembered(operandTexts, row, (r) =>
  operands(r).slice(0, 4).map(([n, v]) => `${n} ${v}`).join("  "));
/** Draw the longest text that fits into a bar, and below the name of an instruction its operands if there is room. */
function drawText(i, r) {
  const k = size.k, wait = isWait(i), name = phaseOf(i).name, point = Math.round(Math.min(12 * k, r.h * 0.72));
  const left = Math.max(r.x, gutter()), room = Math.min(r.x + r.w, size.w) - left - 10 * k;
  const texts = wait ? [label(i), `← ${kind[i] === PAGE_WAIT ? "page" : cause(i)}`]
    : layer[i] < PROLOGUE ? [`${name}  [${layer[i]}]`, name] : [name];
  const x = left + 5 * k, y = r.y + r.h / 2, tall = !wait && r.h > 34 * k;
  ctx.textBaseline = "middle";
  ctx.fillStyle = wait ? colours.text : colours.ink[shadeOf[i]];
  let two = false;
  if (tall) {
    const values = operandText(record[i]);
    setFont(point * 0.85);
    two = values !== "" && textWidth(values) <= room;
    if (two) ctx.fillText(values, x, y + point * 0.72);
  }
  setFont(point, wait ? "italic " : "");
  const text = texts.find((t) => textWidth(t) <= room);
  if (!text) return;
  if (wait) {
    // A patch behind a wait's label, so that the hatching does not cross the letters.
    ctx.fillStyle = colours.waitFill; ctx.fillRect(x - 3 * k, y - point * 0.7, textWidth(text) + 6 * k, point * 1.35);
    ctx.fillStyle = colours.text;
  }
  ctx.fillText(text, x, y - (two ? point * 0.62 : 0));
}
