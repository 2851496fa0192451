// Draws what lies on top of the bars (critical path, selection, arrows, measure) and around them (labels, ruler, overview).

let selected = -1, hovered = -1, showPath = false, measure = null;
const pathOf = (s) => s.summary.critical_path.links.map((l) => s.first + l.interval);
const onPath = new Uint8Array(count);
{
  const instances = new Set(sources.flatMap(pathOf).map(instanceOf));
  if (instances.size) for (let i = 0; i < count; i++) if (!isWait(i) && instances.has(instanceOf(i))) onPath[i] = 1;
}

function drawOverlay() {
  if (showPath) for (const s of sources) drawPath(pathOf(s));
  drawSelection();
}
function drawPath(intervals) {
  const k = size.k;
  ctx.strokeStyle = colours.accent; ctx.lineWidth = 2 * k; ctx.lineJoin = "round";
  ctx.beginPath();
  let last = null;
  for (const i of intervals) {
    if (last !== null && endOf(i) >= view.t0 && begin[last] <= view.t1) {
      const a = barBox(last), b = barBox(i);
      ctx.moveTo(a.x + a.w, a.y + a.h / 2);
      ctx.lineTo(b.x, b.y + b.h / 2);
      ctx.lineTo(b.x + b.w, b.y + b.h / 2);
    }
    last = i;
  }
  ctx.stroke();
}
function drawSelection() {
  const k = size.k;
  const mates = selected >= 0 && twin[selected] >= 0 ? [[twin[selected], 2]] : [];
  for (const [i, width] of [[hovered, 1.5], ...mates, [selected, 3]]) {
    if (i < 0) continue;
    const r = barBox(i);
    ctx.strokeStyle = colours.text; ctx.lineWidth = width * k;
    ctx.strokeRect(r.x - k, r.y - k, r.w + 2 * k, r.h + 2 * k);
  }
  const wait = waitOf(selected);
  if (wait >= 0 && releaser[wait] >= 0) arrow(releaser[wait], wait);
}
/** An arrow to a wait from the interval whose signal ended it. An error bar shows the error of two ranks' clocks. */
function arrow(from, to) {
  const k = size.k, a = barBox(from), b = barBox(to), source = sourceOfLane(lane[from]);
  const x0 = toX(endOf(from)), y0 = a.y + a.h / 2, x1 = toX(endOf(to)), y1 = b.y + b.h / 2;
  ctx.strokeStyle = ctx.fillStyle = colours.accent; ctx.lineWidth = 2 * k;
  ctx.strokeRect(a.x, a.y, a.w, a.h);
  const bend = Math.min(80 * k, Math.max(8 * k, Math.abs(x1 - x0) / 2)), tip = x1 - k, head = 5 * k;
  ctx.beginPath(); ctx.moveTo(x0, y0); ctx.bezierCurveTo(x0 + bend, y0, tip - bend, y1, tip - 1.4 * head, y1); ctx.stroke();
  ctx.beginPath(); ctx.moveTo(tip, y1); ctx.lineTo(tip - 1.8 * head, y1 - head); ctx.lineTo(tip - 1.8 * head, y1 + head); ctx.fill();
  ctx.beginPath(); ctx.arc(x0, y0, 3.2 * k, 0, 7); ctx.fill();
  const error = (source.summary.clock_error_s / meta.unit_s) * scale();
  if (error >= k && rankOfLane(lane[from]) !== rankOfLane(lane[to])) {
    ctx.beginPath(); ctx.moveTo(x0 - error, y0); ctx.lineTo(x0 + error, y0);
    for (const x of [x0 - error, x0 + error]) { ctx.moveTo(x, y0 - 4 * k); ctx.lineTo(x, y0 + 4 * k); }
    ctx.stroke();
  }
}

// -- the measure: the time between two moments that the user has marked
function drawMeasure() {
  if (!measure) return;
  const k = size.k, [a, b] = [Math.min(measure.a, measure.b), Math.max(measure.a, measure.b)];
  const x0 = Math.max(toX(a), gutter()), x1 = Math.min(toX(b), size.w);
  if (x1 < gutter() || x0 > size.w) return;
  ctx.fillStyle = colours.accent;
  ctx.globalAlpha = 0.1; ctx.fillRect(x0, layersTop(), x1 - x0, size.h - layersTop()); ctx.globalAlpha = 1;
  for (const x of [x0, x1]) ctx.fillRect(Math.round(x) - k / 2, rulerTop() + 4 * k, k, size.h);
  setFont(12 * k, "600 "); ctx.textBaseline = "middle";
  const text = time(b - a, 4), wide = textWidth(text), y = rulerTop() + 13 * k;
  const x = Math.min(Math.max((x0 + x1 - wide) / 2, gutter() + 6 * k), size.w - wide - 8 * k);
  ctx.fillRect(x - 6 * k, y - 10 * k, wide + 12 * k, 20 * k);
  ctx.fillStyle = colours.panel; ctx.fillText(text, x, y + k);
}

// -- ruler, labels, overview
function ticks() {
  const rough = ((view.t1 - view.t0) * meta.unit_s * 110 * size.k) / (size.w - gutter());
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) / meta.unit_s;
  const found = [];
  for (let n = Math.ceil(view.t0 / step); n * step <= view.t1; n++) found.push(n * step);
  return found;
}
function drawRuler() {
  const k = size.k, y = rulerTop() + 12 * k, bottom = layersTop() - 2 * k;
  ctx.fillStyle = colours.panel; ctx.fillRect(0, 0, size.w, bottom);
  ctx.fillStyle = colours.line; ctx.fillRect(0, bottom, size.w, k);
  setFont(11 * k); ctx.textBaseline = "middle"; ctx.textAlign = "center";
  const digits = Math.max(3, Math.ceil(Math.log10(Math.max(1, view.t1 / (view.t1 - view.t0)))) + 3);
  for (const t of ticks()) {
    const x = Math.round(toX(t));
    ctx.fillStyle = colours.line; ctx.fillRect(x, bottom - 5 * k, k, 5 * k);
    ctx.fillStyle = colours.dim;
    if (x > gutter() + 24 * k && x < size.w - 30 * k) ctx.fillText(time(t, digits), x, y);
  }
  ctx.textAlign = "left"; ctx.fillStyle = colours.dim;
  ctx.fillText(time(view.t1 - view.t0), 14 * k, y);
}
function drawRowLabels(shown) {
  const k = size.k;
  ctx.fillStyle = colours.panel; ctx.fillRect(0, rowsTop(), gutter(), size.h);
  ctx.fillStyle = colours.line; ctx.fillRect(gutter() - k, rowsTop(), k, size.h);
  ctx.fillRect(0, rowsTop() - k, size.w, k);
  ctx.save();
  ctx.beginPath(); ctx.rect(0, rowsTop(), gutter(), size.h); ctx.clip();
  ctx.textBaseline = "middle";
  let free = -Infinity; // bottom of the last label: rows may be lower than letters, and labels must not overlap
  for (const row of shown) {
    const bar = row.h >= 34 * k && row.role < 0, lift = bar ? 6 * k : 0, x = (8 + row.depth * 9) * k, point = 12 * k;
    const y = Math.max(rowY(row) + row.h / 2, rowsTop() + lift + point * 0.6); // the label of the first row is not cut
    if (row.n === cursor) { ctx.fillStyle = colours.accent; ctx.fillRect(0, rowY(row), 3 * k, row.h); }
    if (y - point / 2 < free) continue;
    free = row === stuck ? rowY(row) + row.h : y + point * 0.7;
    if (row.openable && row.h >= 10 * k) triangle(x, y, row.isOpen);
    setFont(row.role < 0 ? point : 11 * k, row.type === "rank" ? "600 " : "");
    ctx.fillStyle = row.role < 0 ? colours.text : colours.dim;
    ctx.fillText(row.text, x + 12 * k, y - lift);
    if (bar) busyBar(row, x + 12 * k, y + 6 * k, 72 * k);
  }
  unclip();
  const room = size.h - rowsTop();
  if (rowsHeight > room) {
    ctx.fillStyle = colours.dim; ctx.globalAlpha = 0.5;
    ctx.fillRect(size.w - 6 * k, rowsTop() + (room * view.scroll) / rowsHeight, 4 * k, Math.max(20 * k, (room * room) / rowsHeight));
    ctx.globalAlpha = 1;
  }
}
function triangle(x, y, down) {
  const k = size.k;
  ctx.fillStyle = colours.dim;
  ctx.beginPath();
  if (down) { ctx.moveTo(x, y - 2 * k); ctx.lineTo(x + 8 * k, y - 2 * k); ctx.lineTo(x + 4 * k, y + 4 * k); }
  else { ctx.moveTo(x + 1 * k, y - 4 * k); ctx.lineTo(x + 7 * k, y); ctx.lineTo(x + 1 * k, y + 4 * k); }
  ctx.fill();
}
/** Draw a bar with the mean busy and waiting fractions of a row's workers. */
function busyBar(row, x, y, wide) {
  const workers = row.source.summary.per_worker.slice(row.lane0 - row.source.lane0, row.lane1 - row.source.lane0);
  const mean = (key) => workers.reduce((sum, w) => sum + w[key], 0) / workers.length, busy = mean("busy");
  ctx.fillStyle = colours.line; ctx.fillRect(x, y, wide, 4 * size.k);
  ctx.fillStyle = colours.wait; ctx.fillRect(x, y, wide * Math.min(1, busy + mean("wait")), 4 * size.k);
  ctx.fillStyle = colours.text; ctx.fillRect(x, y, wide * busy, 4 * size.k);
}

/** A strip that shows the whole trace: the fraction of all workers' time per phase. The drawn strip is kept until it changes. */
let overview = null;
const strip = () => ({ x: gutter(), y: 8 * size.k, w: size.w - gutter() - 10 * size.k, h: 34 * size.k });
function makeOverview() {
  const { w, h } = strip(), columns = Math.max(1, Math.floor(w)), px = columns / meta.span;
  overview = document.createElement("canvas");
  overview.width = columns; overview.height = h;
  const g = overview.getContext("2d");
  sources.forEach((s, n) => {
    const sums = new Share(columns), to = s.lane0 + s.ranks * s.workers, tall = h / sources.length;
    for (let p = pieceStart[s.lane0]; p < pieceStart[to]; p++) {
      const part = partOf(pieceOf[p]);
      if (part !== WAITING && !partHidden(part)) sums.add(part, pieceBegin[p] * px, pieceEnd[p] * px);
    }
    const parts = sums.settle().parts();
    for (let x = 0; x < columns; x++) {
      let y = tall * (n + 1);
      for (const p of parts) {
        const part = (sums.sums[p * columns + x] / (to - s.lane0)) * (tall - (sources.length > 1 ? size.k : 0));
        if (part) { g.fillStyle = colours.shade[p]; g.fillRect(x, y - part, 1, part); y -= part; }
      }
    }
  });
}
function drawOverview() {
  if (!overview) makeOverview();
  const { x, y, w, h } = strip(), k = size.k;
  ctx.fillStyle = colours.stripe; ctx.fillRect(x, y, w, h);
  ctx.drawImage(overview, x, y);
  const at = (t) => x + w * Math.min(Math.max(t / meta.span, 0), 1), a = at(view.t0), b = at(view.t1);
  ctx.fillStyle = colours.panel; ctx.globalAlpha = 0.72;
  ctx.fillRect(x, y, a - x, h); ctx.fillRect(b, y, x + w - b, h);
  ctx.globalAlpha = 1;
  ctx.strokeStyle = colours.dim; ctx.lineWidth = k; ctx.strokeRect(a + k / 2, y + k / 2, Math.max(b - a - k, 2 * k), h - k);
  setFont(11 * k); ctx.textBaseline = "middle"; ctx.fillStyle = colours.dim;
  if (sources.length > 1) sources.forEach((s, n) => ctx.fillText(`${s.letter} ${s.source}`, 14 * k, y + (h * (n + 0.5)) / sources.length));
  else ctx.fillText("all workers", 14 * k, y + h / 2);
}
