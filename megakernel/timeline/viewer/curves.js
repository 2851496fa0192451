// Draws the curves above the timeline's rows. A curve shows how much a resource, such as memory, is used over time, as
// a fraction of its peak rate. The area is the mean over ranks, and a lighter area reaches up to the busiest rank.

const RESOURCES = meta.resources.length, CURVE_ROW = 24;
let curvesShown = true;
/** For each trace and resource, per bin: the mean, minimum and maximum over ranks, and the prefix sum of the means. */
for (const s of sources) {
  s.resources = meta.resources.map(([name, unit], r) => {
    const mean = new Float32Array(s.bins), least = new Float32Array(s.bins).fill(Infinity), most = new Float32Array(s.bins);
    for (let rank = 0; rank < s.ranks; rank++) {
      const from = s.curve + (rank * RESOURCES + r) * s.bins;
      for (let b = 0; b < s.bins; b++) {
        const v = (data.curves[from + b] / meta.curveMost) * s.tops[r];
        mean[b] += v / s.ranks;
        if (v < least[b]) least[b] = v;
        if (v > most[b]) most[b] = v;
      }
    }
    const sum = new Float64Array(s.bins + 1);
    for (let b = 0; b < s.bins; b++) sum[b + 1] = sum[b] + mean[b];
    return { name, unit, peak: s.peaks[r], mean, least, most, sum };
  });
}
// A resource that no trace uses has no curve. A curve's axis ends at a round fraction of the peak rate.
const tracks = [];
for (let r = 0; r < RESOURCES; r++) {
  const all = sources.map((s) => s.resources[r]);
  if (!all.some((x) => x.sum[x.mean.length] > 0)) continue;
  const highest = Math.max(...all.map((x) => { let top = 0; for (let b = 0; b + 8 <= x.mean.length; b += 8) top = Math.max(top, (x.sum[b + 8] - x.sum[b]) / 8); return top; }));
  tracks.push({ r, name: all[0].name, top: [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4].find((t) => t >= highest) ?? 4 });
}
const curvesHeight = () => (curvesShown ? tracks.length * CURVE_ROW * size.k : 0);

/** The sum of the means of all bins before time t; the bin that contains t counts for its fraction before t. */
function sumAt(s, { sum }, t) {
  const b = Math.min(Math.max(((t - s.shift) / s.span) * s.bins, 0), s.bins), whole = Math.floor(b);
  return sum[whole] + (whole < s.bins ? (sum[whole + 1] - sum[whole]) * (b - whole) : 0);
}
/** The mean rate of resource r in trace s over [t0, t1), as a fraction of its peak. */
function meanRate(s, r, t0, t1) {
  const x = s.resources[r];
  return ((sumAt(s, x, t1) - sumAt(s, x, t0)) * (s.span / s.bins)) / (t1 - t0);
}
/** The [minimum, maximum] of the rate, over all ranks and over the bins that touch [t0, t1). */
function spread(s, r, t0, t1) {
  const { least, most } = s.resources[r], scale = s.bins / s.span;
  let low = Infinity, high = 0;
  const last = Math.min(s.bins - 1, Math.floor((t1 - s.shift) * scale));
  for (let b = Math.max(0, Math.floor((t0 - s.shift) * scale)); b <= last; b++) { low = Math.min(low, least[b]); high = Math.max(high, most[b]); }
  return high ? [low, high] : [0, 0];
}
const trackY = (n) => curvesTop() + n * CURVE_ROW * size.k;
function paintCurves() {
  if (!curvesShown) return;
  const k = size.k;
  tracks.forEach(({ r, top }, n) => {
    const bottom = Math.round(trackY(n) + (CURVE_ROW - 3) * k), tall = (CURVE_ROW - 6) * k;
    fill(gutter(), bottom, size.w, bottom + Math.max(1, k / 2), colours.line32, curvesTop());
    sources.forEach((s, which) => paintCurve(s, r, bottom, (v) => Math.min(1, v / top) * tall, which));
  });
}
/** Paint the first trace as an area, with a lighter area up to its busiest rank; the second trace is a line on top. */
function paintCurve(s, r, bottom, up, line) {
  const { pixels } = base, { w, k } = size, left = Math.ceil(gutter()), step = 1 / scale(), thick = Math.ceil(k), x = s.resources[r];
  const per = s.span / s.bins / step;
  const column = (at, from, to, colour) => { for (let y = from; y < to; y++) pixels[y * w + at] = colour; };
  let before = sumAt(s, x, toTime(left)), last = -1;
  for (let at = left; at < w; at++) {
    const t0 = toTime(at), after = sumAt(s, x, t0 + step), value = (after - before) * per, y = Math.round(bottom - up(value));
    before = after;
    if (line) {
      const from = last < 0 ? y : last;
      column(at, Math.min(y, from) - thick, Math.max(y, from), colours.accent32);
      last = y;
    } else {
      if (s.ranks > 1) column(at, Math.round(bottom - up(spread(s, r, t0, t0 + step)[1])), bottom, colours.band32);
      if (value > 0) column(at, Math.min(y, bottom - 1), bottom, colours.curve32);
    }
  }
}
function drawCurveLabels() {
  if (!curvesShown) return;
  const k = size.k;
  ctx.fillStyle = colours.panel; ctx.fillRect(0, curvesTop(), gutter(), curvesHeight() + 4 * k);
  setFont(11 * k); ctx.textBaseline = "middle";
  tracks.forEach(({ r, name, top }, n) => {
    const y = trackY(n) + (CURVE_ROW / 2) * k, [t0, t1] = inTrace(sources[0]);
    ctx.fillStyle = colours.text; ctx.textAlign = "left"; ctx.fillText(name, 8 * k, y);
    ctx.textAlign = "right"; ctx.fillText(percent(meanRate(sources[0], r, t0, t1)), gutter() - 8 * k, y);
    ctx.fillStyle = colours.dim; ctx.textAlign = "right";
    setFont(9 * k);
    const mark = `${percent(top)} of peak`, wide = textWidth(mark);
    ctx.fillStyle = colours.page; ctx.globalAlpha = 0.8; ctx.fillRect(size.w - wide - 10 * k, trackY(n) + k, wide + 6 * k, 10 * k); ctx.globalAlpha = 1;
    ctx.fillStyle = colours.dim; ctx.fillText(mark, size.w - 7 * k, trackY(n) + 6 * k);
    setFont(11 * k);
  });
  ctx.textAlign = "left";
  ctx.fillStyle = colours.line; ctx.fillRect(gutter() - k, curvesTop(), k, curvesHeight());
}
/** The visible time range of a trace. */
const inTrace = (s) => {
  const t0 = Math.max(view.t0, s.shift), t1 = Math.min(view.t1, s.shift + s.span);
  return t1 > t0 ? [t0, t1] : [t0, t0 + 1];
};
/** The index in `tracks` of the curve at height y of the canvas, or -1. */
function trackAt(y) {
  const n = Math.floor((y - curvesTop()) / (CURVE_ROW * size.k));
  return curvesShown && y >= curvesTop() && n < tracks.length ? n : -1;
}
