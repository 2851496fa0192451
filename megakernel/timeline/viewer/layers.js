// Draws a line above the resource curves that shows when each layer was computed. It can be unfolded into a line per
// phase.

const LAYER_ROW = 17, PHASE_ROW = 12, OUTSIDE = 2; // OUTSIDE: the number of blocks besides the layers (prologue and epilogue)
let unfolded = false;
const shadesRun = new Set();
const [PROLOGUE_BLOCK, EPILOGUE_BLOCK] = [0, 1];
// Finds when each layer ran: from the begin of its first COMPUTE interval to the end of its last one. Does so for each
// phase of a layer, too. Intervals shorter than an eighth of their phase's mean are ignored: they had no work.
for (const s of sources) {
  const each = s.layers + OUTSIDE, blocks = s.summary.launches * each, phases = meta.phases.length;
  const begins = new Float64Array(blocks * (phases + 1)).fill(Infinity), ends = new Float64Array(begins.length);
  const took = new Float64Array(begins.length), times = new Uint32Array(begins.length);
  s.blocks = { begin: begins, end: ends, each, count: blocks };
  const computes = function* () {
    for (let i = s.first; i < s.first + s.intervals; i++) {
      if (kind[i] !== COMPUTE) continue;
      const own = layer[i] === PROLOGUE ? PROLOGUE_BLOCK : layer[i] === EPILOGUE ? EPILOGUE_BLOCK : layer[i] + OUTSIDE;
      yield [i, (launch[i] * each + own) * (phases + 1)];
    }
  };
  for (const [i, whole] of computes()) {
    shadesRun.add(shadeOf[i]);
    took[whole + 1 + shadeOf[i]] += endOf(i) - begin[i];
    times[whole + 1 + shadeOf[i]]++;
  }
  for (const [i, whole] of computes()) {
    const own = whole + 1 + shadeOf[i];
    if ((endOf(i) - begin[i]) * 8 * times[own] < took[own]) continue;
    for (const at of [whole, own]) {
      begins[at] = Math.min(begins[at], begin[i]);
      ends[at] = Math.max(ends[at], endOf(i));
    }
  }
}
/** The lines: for each trace, one for its layers (shade -1) and, if unfolded, one for each phase. */
const layerLines = () => sources.flatMap((s) => [-1, ...(unfolded ? [...shadesRun].sort((a, b) => a - b) : [])].map((shade) => ({ s, shade, h: (shade < 0 ? LAYER_ROW : PHASE_ROW) * size.k })));
const layersHeight = () => sources.length * (LAYER_ROW + (unfolded ? shadesRun.size * PHASE_ROW : 0)) * size.k;
/** The visible blocks of a line (runs of the prologue, a layer or the epilogue): begin, end, number and name. */
function* blocksOf({ s, shade }, from = view.t0, to = view.t1) {
  const { begin: b, end: e, each, count: many } = s.blocks, phases = meta.phases.length;
  for (let n = 0; n < many; n++) {
    const at = n * (phases + 1) + shade + 1, t0 = b[at] + s.shift, t1 = e[at] + s.shift, own = n % each;
    if (t1 >= from && t0 <= to) yield { t0, t1, n, name: own === PROLOGUE_BLOCK ? "prologue" : own === EPILOGUE_BLOCK ? "epilogue" : `layer ${own - OUTSIDE}` };
  }
}
function paintLayers() {
  const k = size.k;
  let y = layersTop();
  for (const line of layerLines()) {
    for (const { t0, t1, n } of blocksOf(line)) {
      const x0 = toX(t0), x1 = Math.max(toX(t1), x0 + 1), low = line.shade < 0 && n % 2 ? 2 * k : 0;
      fill(x0, y + k + low, x1, y + line.h - 3 * k + low, line.shade < 0 ? (n % 2 ? colours.line32 : colours.band32) : colours.part32[line.shade], layersTop());
    }
    y += line.h;
  }
}
function drawLayerLabels() {
  const k = size.k;
  let y = layersTop();
  ctx.fillStyle = colours.panel; ctx.fillRect(0, y, gutter(), layersHeight());
  ctx.textBaseline = "middle";
  for (const line of layerLines()) {
    const middle = y + line.h / 2;
    if (line.shade < 0) triangle(8 * k, middle, unfolded);
    setFont((line.shade < 0 ? 11 : 10) * k);
    ctx.fillStyle = colours.dim;
    ctx.fillText(line.shade < 0 ? `${line.s.letter} layers`.trim() : meta.phases[line.shade].name, 20 * k, middle);
    for (const { t0, t1, name } of line.shade < 0 ? blocksOf(line) : []) {
      const x0 = Math.max(toX(t0), gutter()), x1 = Math.min(toX(t1), size.w), text = [name, name.replace("layer ", "")].find((t) => textWidth(t) < x1 - x0 - 4 * k);
      ctx.fillStyle = colours.text;
      if (text) ctx.fillText(text, (x0 + x1 - textWidth(text)) / 2, middle);
    }
    y += line.h;
  }
}
function layerLineAt(y) {
  let top = layersTop();
  return layerLines().find((line) => y >= top && y < (top += line.h));
}
const blockAt = (line, t) => [...blocksOf(line, t, t)].pop();
function toggleLayers() { unfolded = !unfolded; relay(); }
const showBlock = ({ t0, t1 }) => { const margin = (t1 - t0) / 20; setView(t0 - margin, t1 + margin); };
/** Show the next layer (by = 1) or the previous one (by = -1), in order of begin. */
function stepLayer(by) {
  const all = [...blocksOf({ s: sources[0], shade: -1 }, -Infinity, Infinity)].filter((b) => b.t0 < Infinity).sort((a, b) => a.t0 - b.t0);
  const middle = (view.t0 + view.t1) / 2, whole = view.t1 - view.t0 > meta.span;
  const now = whole ? (by > 0 ? -1 : all.length) : all.findLastIndex((b) => b.t0 <= middle);
  showBlock(all[Math.min(Math.max(now + by, 0), all.length - 1)]);
}
