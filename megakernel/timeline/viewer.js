"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  const meta = JSON.parse($("meta").textContent);
  const data = await unpack($("data").textContent, meta.columns);
  $("data").remove();

  // -- the record layout (megakernel/isa/record.py) and the interval kinds (megakernel/trace.py)
  const WORDS = 32, OPERAND = 1, WAIT = 16, WAITS = 8, PROLOGUE = 0xfffe, EPILOGUE = 0xffff;
  const FETCH = 0, PAGE_WAIT = 1, COUNTER_WAIT = 2, LOAD = 3;
  const { begin, length, record, releaser, records, lane, layer, launch, kind, slot } = data;
  const count = begin.length, lanes = meta.ranks * meta.workers;
  const opcodeOf = (i) => records[record[i] * WORDS] & 0xff;
  const instructionOf = (i) => meta.instructions[opcodeOf(i)];
  const endOf = (i) => begin[i] + length[i];
  const isWait = (i) => kind[i] === COUNTER_WAIT || kind[i] === PAGE_WAIT;
  const familyOf = Uint8Array.from({ length: count }, (_, i) => instructionOf(i).family);
  // A shade per instruction: the hue is its family's, the lightness tells it from its siblings.
  const shades = Object.keys(meta.instructions).map(Number), shadeAt = new Map(shades.map((op, n) => [op, n]));
  const shadeOf = Uint8Array.from({ length: count }, (_, i) => shadeAt.get(opcodeOf(i)));

  // -- intervals of a lane by how they are drawn; `reach` is the latest end so far, so binary search works on it
  const CLASS = { wait: 0, load: 1, work: 2 };
  const classOf = (i) => (isWait(i) ? CLASS.wait : kind[i] === LOAD || kind[i] === FETCH ? CLASS.load : CLASS.work);
  const lists = Array.from({ length: lanes * 3 }, () => []);
  for (let i = 0; i < count; i++) lists[lane[i] * 3 + classOf(i)].push(i);
  const reaches = lists.map((list) => {
    let latest = 0;
    return Float64Array.from(list, (i) => (latest = Math.max(latest, endOf(i))));
  });

  // -- state
  const canvas = $("canvas"), ctx = canvas.getContext("2d");
  const view = { t0: 0, t1: meta.span, scroll: 0 };
  const hidden = new Set();
  const pathIntervals = meta.summary.critical_path.links.map((l) => l.interval);
  const instanceOf = (i) => (launch[i] * 65536 + layer[i]) * (meta.segments[0] + meta.segments[1] + meta.segments[2]) + record[i];
  const pathInstances = new Set(pathIntervals.map(instanceOf));
  const onPath = Uint8Array.from({ length: count }, (_, i) => (!isWait(i) && pathInstances.has(instanceOf(i)) ? 1 : 0));
  let selected = -1, hovered = -1, matches = null, matchFlags = null, showPath = false, lastFrame = 0, queued = false;
  let size = { w: 1, h: 1, k: 1 }, colours = {}, base = null, overview = null;

  // -- text
  const escape = (s) => String(s).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  function time(units, digits = 3) {
    const s = Math.abs(units * meta.unit_s);
    const [scale, name] = s >= 1 ? [1, "s"] : s >= 1e-3 ? [1e-3, "ms"] : s >= 1e-6 || s === 0 ? [1e-6, "µs"] : [1e-9, "ns"];
    const value = (units * meta.unit_s) / scale;
    return `${Math.abs(value) >= 1000 ? value.toFixed(0) : Number(value.toPrecision(digits))} ${name}`;
  }
  const seconds = (s) => time(s / meta.unit_s);
  const percent = (x) => (x === null ? "–" : `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)} %`);
  const place = (i) => (layer[i] === PROLOGUE ? "prologue" : layer[i] === EPILOGUE ? "epilogue" : `layer ${layer[i]}`);
  const laneName = (l) => (meta.ranks > 1 ? `rank ${Math.floor(l / meta.workers)} · ${l % meta.workers}` : `worker ${l}`);
  function cause(i, word = slot[i]) {
    const table = layer[i] === 0 ? data.causesFirst : data.causesLater;
    const found = table[record[i] * WAITS + word];
    return found < 0 ? "nothing" : meta.causes[found];
  }
  function label(i) {
    if (kind[i] === PAGE_WAIT) return "waits for a page";
    if (kind[i] === COUNTER_WAIT) return `waits for ${cause(i)}`;
    const name = instructionOf(i).name;
    return kind[i] === LOAD || kind[i] === FETCH ? `${meta.kinds[kind[i]]} for ${name}` : name;
  }
  function operands(r) {
    const names = meta.instructions[records[r * WORDS] & 0xff].operands;
    return names.map((name, k) => [name, records[r * WORDS + OPERAND + k]]);
  }

  const dimmed = (i) => (matchFlags && !matchFlags[i]) || (showPath && !onPath[i]);

  // -- geometry, in device pixels
  const gutter = () => 96 * size.k, top = () => 78 * size.k;
  const laneHeight = () => {
    const room = size.h - top() - 8 * size.k;
    return Math.max(16 * size.k, Math.min(128 * size.k, Math.floor(room / lanes)));
  };
  const laneY = (l) => top() + l * laneHeight() - view.scroll;
  const scale = () => (size.w - gutter()) / (view.t1 - view.t0);
  const toX = (t) => gutter() + (t - view.t0) * scale();
  const toTime = (x) => view.t0 + (x - gutter()) / scale();
  /** The boxes of lane height h: work and waits in the main one, loads in the strip under it. */
  function boxes(h) {
    const gap = Math.max(1, Math.round(h * 0.08)), strip = h >= 24 * size.k ? Math.round(Math.min(h * 0.14, 8 * size.k)) : 0;
    return { y: gap, h: h - 2 * gap - (strip ? strip + size.k : 0), loadY: h - gap - strip, loadH: strip };
  }

  function firstReaching(list, t) {
    const reach = reaches[list];
    let low = 0, high = reach.length;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (reach[mid] < t) low = mid + 1; else high = mid;
    }
    return low;
  }

  // -- drawing
  function request() {
    if (!queued) { queued = true; requestAnimationFrame(draw); }
  }
  function draw() {
    queued = false;
    const started = performance.now();
    const h = laneHeight(), box = boxes(h);
    const shown = [];
    for (let l = 0; l < lanes; l++) if (laneY(l) + h > top() && laneY(l) < size.h) shown.push(l);
    const bars = drawColumns(shown, h, box);
    ctx.save();
    ctx.beginPath(); ctx.rect(gutter(), top(), size.w - gutter(), size.h - top()); ctx.clip();
    drawGrid();
    for (const bar of bars) drawBar(bar, h, box);
    if (showPath) drawPath(h, box);
    drawSelection(h, box);
    ctx.restore();
    drawLabels(shown, h);
    drawRuler();
    drawOverview();
    lastFrame = performance.now() - started;
  }

  /** Paint what is narrower than two pixels as columns of shares, straight into pixels; return the wider intervals. */
  function drawColumns(shown, h, box) {
    const w = size.w, pixels = base.pixels, left = gutter(), px = scale(), bars = [];
    pixels.fill(colours.page32);
    const kinds = shades.length + 1; // the last one is waiting
    const share = new Float32Array(w * kinds);
    for (const l of shown) {
      const y0 = Math.round(laneY(l));
      if (l % 2) for (let y = Math.max(y0, 0); y < Math.min(y0 + h, size.h); y++) pixels.fill(colours.stripe32, y * w + left, (y + 1) * w);
      share.fill(0);
      let any = false;
      for (let c = 0; c < 3; c++) {
        if (hidden.has(c === CLASS.wait ? "wait" : c === CLASS.load ? "load" : "")) continue;
        const id = l * 3 + c, list = lists[id];
        for (let n = firstReaching(id, view.t0); n < list.length; n++) {
          const i = list[n], b = begin[i];
          if (b > view.t1) break;
          if (c === CLASS.work && hidden.has(familyOf[i])) continue;
          if (endOf(i) < view.t0) continue;
          const width = length[i] * px;
          if (width >= 2) { bars.push(i); continue; }
          if (c === CLASS.load || dimmed(i)) continue;
          const x0 = left + Math.max(b - view.t0, 0) * px, x1 = Math.min(left + (endOf(i) - view.t0) * px, w);
          const part = c === CLASS.wait ? kinds - 1 : shadeOf[i];
          for (let x = Math.floor(x0); x < x1; x++) share[x * kinds + part] += Math.min(x1, x + 1) - Math.max(x0, x);
          any = true;
        }
      }
      if (any) paintColumns(share, kinds, y0 + box.y, box.h, left);
    }
    ctx.putImageData(base.image, 0, 0);
    return bars.sort((a, b) => classOf(a) - classOf(b));
  }
  function paintColumns(share, kinds, y0, h, left) {
    const w = size.w, pixels = base.pixels;
    for (let x = left; x < w; x++) {
      let sum = 0;
      for (let f = 0; f < kinds; f++) sum += share[x * kinds + f];
      if (!sum) continue;
      const unit = h / Math.max(1, sum);
      let y = y0 + h;
      for (let f = 0; f < kinds; f++) {
        const tall = Math.round(share[x * kinds + f] * unit);
        const colour = f === kinds - 1 ? colours.wait32 : colours.shade32[f];
        for (let n = 0; n < tall; n++) {
          y--;
          if (y >= top() && y < size.h) pixels[y * w + x] = colour;
        }
      }
    }
  }

  function barBox(i, h, box) {
    const load = classOf(i) === CLASS.load;
    const x0 = Math.max(toX(begin[i]), gutter() - 4), x1 = Math.min(toX(endOf(i)), size.w + 4);
    return { x: x0, w: Math.max(x1 - x0, 1), y: Math.round(laneY(lane[i])) + (load ? box.loadY : box.y), h: load ? box.loadH : box.h };
  }
  function drawBar(i, h, box) {
    const r = barBox(i, h, box);
    if (!r.h) return;
    const k = size.k, spaced = r.w > 4 * k ? 0.5 * k : 0;
    ctx.globalAlpha = dimmed(i) ? 0.13 : 1;
    paintShape(ctx, classOf(i), colours.shade[shadeOf[i]], r.x + spaced, r.y, r.w - 2 * spaced, r.h, k);
    if (classOf(i) !== CLASS.load && r.w > 26 * k && r.h >= 11 * k) drawText(i, r);
    ctx.globalAlpha = 1;
  }
  /** The longest of a few texts that fits, and under work its operands where there is room. */
  function drawText(i, r) {
    const k = size.k, wait = isWait(i), name = instructionOf(i).name, room = r.w - 10 * k, point = Math.min(12 * k, r.h * 0.72);
    const texts = wait ? [label(i), `← ${kind[i] === PAGE_WAIT ? "page" : cause(i)}`] : layer[i] < PROLOGUE ? [`${name}  [${layer[i]}]`, name] : [name];
    const values = operands(record[i]).slice(0, 4).map(([n, v]) => `${n} ${v}`).join("  ");
    const x = r.x + 5 * k, y = r.y + r.h / 2;
    ctx.textBaseline = "middle";
    ctx.font = `${point * 0.85}px ${colours.sans}`;
    const two = !wait && r.h > 34 * k && ctx.measureText(values).width <= room;
    ctx.fillStyle = wait ? colours.text : colours.ink[shadeOf[i]];
    if (two) { ctx.globalAlpha *= 0.8; ctx.fillText(values, x, y + point * 0.72); ctx.globalAlpha /= 0.8; }
    ctx.font = `${wait ? "italic " : ""}${point}px ${colours.sans}`;
    const text = texts.find((t) => ctx.measureText(t).width <= room);
    if (!text) return;
    if (wait) plate(text, x, y, point);
    ctx.fillText(text, x, y - (two ? point * 0.62 : 0));
  }
  /** A patch behind a wait's label, so that the hatching does not cross the letters. */
  function plate(text, x, y, point) {
    const ink = ctx.fillStyle;
    ctx.fillStyle = colours.waitFill;
    ctx.fillRect(x - 3 * size.k, y - point * 0.7, ctx.measureText(text).width + 6 * size.k, point * 1.35);
    ctx.fillStyle = ink;
  }
  function paintShape(g, shape, colour, x, y, w, h, k) {
    if (shape === CLASS.wait) {
      g.fillStyle = colours.hatch; g.fillRect(x, y, w, h);
      if (w > 4 * k) { g.strokeStyle = colours.wait; g.lineWidth = k; g.strokeRect(x + k / 2, y + k / 2, w - k, h - k); }
      return;
    }
    g.fillStyle = colour;
    if (w > 6 * k && shape === CLASS.work) { g.beginPath(); g.roundRect(x, y, w, h, 2.5 * k); g.fill(); }
    else g.fillRect(x, y, w, h);
  }

  function drawPath(h, box) {
    const k = size.k;
    ctx.strokeStyle = colours.accent; ctx.lineWidth = 2 * k;
    ctx.beginPath();
    let last = null;
    for (const i of pathIntervals) {
      const r = barBox(i, h, box);
      if (last && r.x + r.w > gutter() && last.x < size.w) {
        ctx.moveTo(last.x + last.w, last.y + last.h / 2);
        ctx.lineTo(r.x, r.y + r.h / 2);
      }
      last = r;
    }
    ctx.stroke();
  }
  function drawSelection(h, box) {
    const k = size.k;
    for (const [i, width] of [[hovered, 1.5], [selected, 3]]) {
      if (i < 0) continue;
      const r = barBox(i, h, box);
      ctx.strokeStyle = colours.text; ctx.lineWidth = width * k;
      ctx.strokeRect(r.x - k, r.y - k, r.w + 2 * k, r.h + 2 * k);
    }
    const wait = selected < 0 ? -1 : isWait(selected) ? selected : waitOf(selected);
    if (wait >= 0 && releaser[wait] >= 0) arrow(releaser[wait], wait, h, box);
  }
  /** From the end of the releasing interval to the end of the wait. */
  function arrow(from, to, h, box) {
    const k = size.k, a = barBox(from, h, box), b = barBox(to, h, box);
    const x0 = toX(endOf(from)), y0 = a.y + a.h / 2, x1 = toX(endOf(to)), y1 = b.y + b.h / 2;
    ctx.strokeStyle = ctx.fillStyle = colours.accent; ctx.lineWidth = 2 * k;
    ctx.strokeRect(a.x, a.y, a.w, a.h);
    const bend = Math.min(80 * k, Math.max(8 * k, Math.abs(x1 - x0) / 2)), tip = x1 - 1 * k;
    ctx.beginPath(); ctx.moveTo(x0, y0); ctx.bezierCurveTo(x0 + bend, y0, tip - bend, y1, tip - 7 * k, y1); ctx.stroke();
    ctx.beginPath(); ctx.moveTo(tip, y1); ctx.lineTo(tip - 9 * k, y1 - 5 * k); ctx.lineTo(tip - 9 * k, y1 + 5 * k); ctx.fill();
    ctx.beginPath(); ctx.arc(x0, y0, 3.5 * k, 0, 7); ctx.fill();
  }

  function ticks() {
    const rough = ((view.t1 - view.t0) * meta.unit_s * 110 * size.k) / (size.w - gutter());
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) / meta.unit_s;
    const found = [];
    for (let n = Math.ceil(view.t0 / step); n * step <= view.t1; n++) found.push(n * step);
    return found;
  }
  function drawGrid() {
    ctx.fillStyle = colours.line;
    for (const t of ticks()) ctx.fillRect(Math.round(toX(t)), top(), size.k * 0.5, size.h);
  }
  function drawRuler() {
    const k = size.k, y = 48 * k;
    ctx.fillStyle = colours.panel; ctx.fillRect(0, 0, size.w, top() - 4 * k);
    ctx.fillStyle = colours.line; ctx.fillRect(0, top() - 4 * k, size.w, k);
    ctx.font = `${11 * k}px ${colours.sans}`; ctx.textBaseline = "middle"; ctx.textAlign = "center";
    const shown = ticks(), digits = Math.max(3, Math.ceil(Math.log10(view.t1 / (view.t1 - view.t0))) + 3);
    for (const t of shown) {
      const x = Math.round(toX(t));
      ctx.fillStyle = colours.line; ctx.fillRect(x, top() - 11 * k, k, 7 * k);
      ctx.fillStyle = colours.dim;
      if (x > gutter() + 24 * k && x < size.w - 30 * k) ctx.fillText(time(t, digits), x, y + 10 * k);
    }
    ctx.textAlign = "left";
    ctx.fillText(time(view.t1 - view.t0), 14 * k, y + 10 * k);
  }
  function drawLabels(shown, h) {
    const k = size.k;
    ctx.fillStyle = colours.panel; ctx.fillRect(0, top(), gutter(), size.h);
    ctx.fillStyle = colours.line; ctx.fillRect(gutter() - k, top(), k, size.h);
    const point = Math.min(12 * k, h * 0.7);
    for (const l of shown) {
      const y = laneY(l) + h / 2, worker = meta.summary.per_worker[l], bar = h >= 34 * k;
      ctx.font = `${point}px ${colours.sans}`; ctx.textBaseline = "middle"; ctx.fillStyle = colours.text;
      ctx.fillText(laneName(l), 14 * k, y - (bar ? 6 * k : 0));
      if (!bar) continue;
      ctx.fillStyle = colours.line; ctx.fillRect(14 * k, y + 6 * k, 60 * k, 4 * k);
      ctx.fillStyle = colours.dim; ctx.fillRect(14 * k, y + 6 * k, 60 * k * worker.busy, 4 * k);
    }
    const total = lanes * h, room = size.h - top();
    if (total > room) {
      ctx.fillStyle = colours.dim; ctx.globalAlpha = 0.5;
      ctx.fillRect(size.w - 6 * k, top() + (room * view.scroll) / total, 4 * k, (room * room) / total);
      ctx.globalAlpha = 1;
    }
  }

  /** The whole trace in a strip: shares of all lanes' time by family, made once per size and theme. */
  const strip = () => ({ x: gutter(), y: 10 * size.k, w: size.w - gutter() - 10 * size.k, h: 34 * size.k });
  function makeOverview() {
    const { w, h } = strip(), columns = Math.max(1, Math.floor(w)), kinds = shades.length;
    const share = new Float64Array(columns * kinds), px = columns / meta.span;
    for (let i = 0; i < count; i++) {
      if (classOf(i) !== CLASS.work || hidden.has(familyOf[i])) continue;
      const x0 = begin[i] * px, x1 = endOf(i) * px;
      for (let x = Math.floor(x0); x < Math.min(x1, columns); x++) {
        share[x * kinds + shadeOf[i]] += Math.min(x1, x + 1) - Math.max(x0, x);
      }
    }
    overview = document.createElement("canvas");
    overview.width = columns; overview.height = h;
    const g = overview.getContext("2d");
    for (let x = 0; x < columns; x++) {
      let y = h;
      for (let f = 0; f < kinds; f++) {
        const tall = (share[x * kinds + f] / lanes) * h;
        g.fillStyle = colours.shade[f]; g.fillRect(x, y - tall, 1, tall);
        y -= tall;
      }
    }
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
    ctx.font = `${11 * k}px ${colours.sans}`; ctx.textBaseline = "middle"; ctx.fillStyle = colours.dim;
    ctx.fillText("all workers", 14 * k, y + h / 2);
  }

  // -- moving about
  function setView(t0, t1) {
    const span = Math.min(Math.max(t1 - t0, 20), meta.span * 1.02), margin = meta.span * 0.01;
    t0 = Math.min(Math.max(t0, -margin), meta.span + margin - span);
    view.t0 = t0; view.t1 = t0 + span;
    request();
  }
  const fit = () => { view.scroll = 0; setView(-meta.span * 0.005, meta.span * 1.01); };
  const pan = (part) => setView(view.t0 + part * (view.t1 - view.t0), view.t1 + part * (view.t1 - view.t0));
  function zoom(factor, at = (view.t0 + view.t1) / 2) {
    const span = Math.min(Math.max((view.t1 - view.t0) * factor, 20), meta.span * 1.02);
    const left = at - ((at - view.t0) / (view.t1 - view.t0)) * span;
    setView(left, left + span);
  }
  function scrollLanes(by) {
    const most = Math.max(0, lanes * laneHeight() - (size.h - top()));
    view.scroll = Math.min(Math.max(view.scroll + by, 0), most);
    request();
  }
  function reveal(i) {
    const span = view.t1 - view.t0, middle = begin[i] + length[i] / 2;
    if (begin[i] < view.t0 || endOf(i) > view.t1) {
      const wide = Math.max(span, length[i] * 1.5);
      setView(middle - wide / 2, middle + wide / 2);
    }
    const y = laneY(lane[i]), h = laneHeight();
    if (y < top()) scrollLanes(y - top());
    else if (y + h > size.h) scrollLanes(y + h - size.h);
  }
  function zoomTo(i) {
    const wide = Math.max(length[i], 1) * 6, middle = begin[i] + length[i] / 2;
    setView(middle - wide / 2, middle + wide / 2);
  }

  function hit(x, y) {
    if (x < gutter() || y < top()) return -1;
    const h = laneHeight(), l = Math.floor((y - top() + view.scroll) / h);
    if (l < 0 || l >= lanes) return -1;
    const box = boxes(h), inLoad = box.loadH && y - laneY(l) >= box.loadY - size.k, t = toTime(x), slop = 2 / scale();
    let best = -1, distance = slop;
    for (const c of inLoad ? [CLASS.load] : [CLASS.work, CLASS.wait]) {
      if (hidden.has(c === CLASS.wait ? "wait" : c === CLASS.load ? "load" : "")) continue;
      const id = l * 3 + c, list = lists[id];
      for (let n = firstReaching(id, t - slop); n < list.length && begin[list[n]] <= t + slop; n++) {
        const i = list[n], off = Math.max(begin[i] - t, t - endOf(i), 0);
        if (c === CLASS.work && hidden.has(familyOf[i])) continue;
        if (off < distance || (off === 0 && best < 0)) { best = i; distance = off; }
      }
      if (best >= 0 && distance === 0) break;
    }
    return best;
  }

  // -- selection and its relatives
  /** Intervals of the same executed instruction; they lie together in their lane. */
  function siblings(i) {
    const found = [];
    for (let c = 0; c < 3; c++) {
      const id = lane[i] * 3 + c, list = lists[id];
      for (const j of list) if (instanceOf(j) === instanceOf(i)) found.push(j);
    }
    return found.sort((a, b) => begin[a] - begin[b]);
  }
  const waitOf = (i) => siblings(i).filter((j) => kind[j] === COUNTER_WAIT).pop() ?? -1;
  function select(i) {
    selected = i >= 0 && i < count ? i : -1;
    details();
    request();
  }
  function choose(i) { select(i); if (i >= 0) reveal(i); }

  function details() {
    const panel = $("details");
    panel.hidden = selected < 0;
    if (selected < 0) return;
    const i = selected, r = record[i], it = instructionOf(i), rows = [], family = meta.families[it.family][0];
    const row = (name, value) => rows.push(`<tr><td>${name}</td><td>${value}</td></tr>`);
    const link = (j, text) => `<button class="link" data-select="${j}">${escape(text)}</button>`;
    const where = (j) => `${instructionOf(j).name} · ${place(j)} · ${laneName(lane[j])}`;
    row("begin", time(begin[i], 6));
    row("end", time(endOf(i), 6));
    row("duration", `<b>${time(length[i], 4)}</b>`);
    if (meta.summary.launches > 1) row("launch", launch[i] + 1);
    if (kind[i] === COUNTER_WAIT) row("waits for", escape(cause(i)));
    const wait = isWait(i) ? i : waitOf(i);
    if (wait >= 0 && releaser[wait] >= 0) row("released by", link(releaser[wait], where(releaser[wait])));
    const operandRows = operands(r).map(([n, v]) => `<tr><td><code>${n}</code></td><td><code>${v}</code></td></tr>`);
    const waits = [];
    for (let w = 0; w < WAITS; w++) {
      const word = records[r * WORDS + WAIT + w];
      if (word) waits.push(`<tr><td>counter <code>${(word & 0xffffff) - 1}${word & (1 << 29) ? "+" : ""}</code></td><td>${escape(cause(i, w))}</td></tr>`);
    }
    const regions = [];
    for (let n = data.regionStart[r]; n < data.regionStart[r + 1]; n++) {
      const [b, a, r0, r1, c0, c1, x, copy] = data.regions.subarray(n * 8, n * 8 + 8);
      const by = x ? ` <small>by ${meta.indexes[x]}</small>` : "";
      const own = copy === -1 || copy === Math.floor(lane[i] / meta.workers);
      const to = own ? "" : ` <small>at ${meta.copies[copy] ?? `rank ${copy}`}</small>`;
      regions.push(`<tr><td>${meta.accesses[a]} <code>${meta.buffers[b]}</code></td><td><code>${r0}:${r1}, ${c0}:${c1}</code>${by}${to}</td></tr>`);
    }
    const parts = siblings(i).filter((j) => j !== i).map((j) => `<tr><td>${link(j, meta.kinds[kind[j]])}</td><td>${time(length[j])}</td></tr>`);
    const after = [];
    for (let j = 0; j < count; j++) if (releaser[j] === i) after.push(j);
    const released = after.slice(0, 8).map((j) => `<tr><td>${laneName(lane[j])}</td><td>${link(j, instructionOf(j).name)}</td></tr>`);
    if (after.length > 8) released.push(`<tr><td></td><td>${after.length - 8} more</td></tr>`);
    const section = (title, content) => (content.length ? `<h2>${title}</h2><table>${content.join("")}</table>` : "");
    panel.innerHTML = `<h3><i class="swatch" style="background:${colours.shade[shadeOf[i]]}"></i>${escape(it.name)}</h3>
      <p>${meta.kinds[kind[i]]} · ${place(i)} · ${laneName(lane[i])} · ${family}</p><table>${rows.join("")}</table>
      ${section("Operands", operandRows)}${section("Waits for", waits)}${section("Same instruction", parts)}
      ${section("Released", released)}${section("Regions (rows, columns)", regions)}
      <h2>Meaning</h2><code>${escape(it.semantics)}</code>`;
  }

  // -- finding: words of a name, or name=value of an operand, layer, worker, rank
  function find(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    matches = matchFlags = null;
    if (words.length) {
      const placed = words.filter((w) => /^(layer|worker|rank)=/.test(w)), plain = words.filter((w) => !placed.includes(w));
      const total = records.length / WORDS, flags = new Uint8Array(total);
      for (let r = 0; r < total; r++) {
        const name = meta.instructions[records[r * WORDS] & 0xff].name;
        const pairs = operands(r).map(([n, v]) => `${n}=${v}`);
        flags[r] = plain.every((w) => (w.includes("=") ? pairs.includes(w) : name.includes(w))) ? 1 : 0;
      }
      const values = { layer: (i) => layer[i], worker: (i) => lane[i] % meta.workers, rank: (i) => Math.floor(lane[i] / meta.workers) };
      const tests = placed.map((w) => w.split("=")).map(([name, v]) => (i) => values[name](i) === Number(v));
      matchFlags = Uint8Array.from(record, (r, i) => (flags[r] && tests.every((t) => t(i)) ? 1 : 0));
      matches = [];
      for (let i = 0; i < count; i++) if (matchFlags[i] && classOf(i) === CLASS.work) matches.push(i);
      matches.sort((a, b) => begin[a] - begin[b]);
    }
    $("matches").textContent = matches ? matches.length : "";
    request();
    return matches ? matches.length : 0;
  }
  function step(by) {
    if (!matches || !matches.length) return;
    const at = matches.indexOf(selected);
    choose(matches[at < 0 ? (by > 0 ? 0 : matches.length - 1) : (at + by + matches.length) % matches.length]);
  }

  // -- panels
  function summary() {
    const s = meta.summary, o = s.overlap;
    const number = (value, name, title) => `<div title="${escape(title)}"><b>${value}</b><span>${name}</span></div>`;
    const bar = (name, value, parts, find) => {
      const inner = parts.map(([w, c]) => `<i style="width:${100 * w}%;background:${c}"></i>`).join("");
      const cells = `<span class="name" title="${escape(name)}">${escape(name)}</span><span class="bar">${inner}</span><span class="value">${value}</span>`;
      return find ? `<button data-find="${find}">${cells}</button>` : cells;
    };
    const shade = (name) => colours.shade[shades.findIndex((op) => meta.instructions[op].name === name)];
    const most = Math.max(...s.instructions.map((x) => x.share)), worst = Math.max(0, ...s.waits.map((x) => x.share));
    const path = s.critical_path, workers = s.per_worker.length <= 16 ? s.per_worker : [];
    $("summary").innerHTML = `
      ${s.dropped ? `<p class="warning">${s.dropped.toLocaleString("en")} intervals were dropped: the buffer was full. What is shown is incomplete.</p>` : ""}
      <h2>Step</h2><div class="numbers">
      ${number(seconds(s.step_s), "per step", "last end − first begin, mean over launches")}
      ${number(percent(s.busy), "workers busy", "COMPUTE, STORE or LOAD outside a wait; mean over workers")}
      ${number(percent(s.wait), "workers waiting", "counter or page waits without COMPUTE or STORE; mean over workers")}
      ${number(percent(s.imbalance), "imbalance", "busiest worker ÷ mean − 1")}</div>
      <h2>Overlap</h2><div class="numbers">
      ${number(percent(o.phases), "phases overlapping", "time in which workers compute instructions of two or more (layer, opcode) ÷ time in which some worker computes")}
      ${number(percent(o.inside_worker), "loads hidden", "LOAD time under a wait or an earlier instruction's compute ÷ LOAD time")}
      ${number(percent(o.across_workers), "memory under compute", "time with a memory-bound instruction beside a compute-bound one ÷ time with a memory-bound one")}
      ${meta.ranks > 1 ? number(percent(o.across_ranks), "ranks overlapping", "time in which ranks compute instructions of two or more (layer, opcode) ÷ time in which some worker computes") : ""}
      ${number(percent(s.exposed_communication), "exposed communication", "time blocked on counters whose last arrival is remote ÷ (workers × step)")}</div>
      <h2>Work</h2><div class="bars">${s.instructions.map((x) => bar(x.name, percent(x.share), [[x.share / most, shade(x.name)]], x.name)).join("")}</div>
      <h2>Waits</h2><div class="bars">${s.waits.slice(0, 8).map((x) => bar(`${x.instruction} ← ${x.cause}`, percent(x.share), [[x.share / worst, colours.wait]])).join("")}</div>
      <h2>Critical path</h2><div class="bars">${Object.entries(path.by_instruction).slice(0, 8).map(([n, t]) => bar(n, percent(t / path.seconds), [[t / path.seconds, colours.accent]])).join("")}${bar("gaps", percent(path.gap_s / path.seconds), [[path.gap_s / path.seconds, colours.wait]])}</div>
      ${workers.length ? `<h2>Workers</h2><div class="bars">${workers.map((x, l) => bar(laneName(l), percent(x.busy), [[x.busy, colours.text], [x.wait, colours.wait]])).join("")}</div>` : ""}`;
    $("headline").innerHTML = `<b>${seconds(s.step_s)}</b> per step · ${escape(meta.source)} on ${escape(meta.machine)} · ${lanes} worker${lanes > 1 ? "s" : ""} · ${meta.tokens} token row${meta.tokens > 1 ? "s" : ""} × ${meta.layers} layers · ${count.toLocaleString("en")} intervals · program ${escape(meta.program)}`;
  }
  function legend() {
    const used = new Set(familyOf);
    const item = (key, swatch, name) => `<button data-toggle="${key}" aria-pressed="${!hidden.has(key)}">${swatch}${name}</button>`;
    const families = meta.families.map(([name], f) => (used.has(f) ? item(f, `<i class="swatch" style="background:${colours.family[f]}"></i>`, name) : ""));
    $("legend").innerHTML = families.join("") + item("wait", '<i class="swatch wait"></i>', "wait") + item("load", '<i class="swatch load"></i>', "load");
  }
  function tooltip(x, y) {
    const tip = $("tooltip");
    tip.hidden = hovered < 0;
    if (hovered < 0) return;
    const i = hovered, values = operands(record[i]).map(([n, v]) => `${n} ${v}`).join(", ");
    const first = isWait(i) ? `${instructionOf(i).name} ${label(i)}` : label(i);
    tip.innerHTML = `<b>${escape(first)}</b> &nbsp;${time(length[i])}<small>${place(i)} · ${laneName(lane[i])}${values ? ` · ${escape(values)}` : ""}</small>`;
    const w = canvas.clientWidth, right = x + 16 + tip.offsetWidth > w;
    tip.style.left = `${right ? Math.max(0, x - tip.offsetWidth - 12) : x + 16}px`;
    tip.style.top = `${Math.min(y + 18, canvas.clientHeight - tip.offsetHeight - 4)}px`;
  }

  // -- theme
  function theme(name) {
    document.documentElement.dataset.theme = name;
    const css = getComputedStyle(document.documentElement), get = (n) => css.getPropertyValue(n).trim();
    colours = { text: get("--text"), dim: get("--dim"), line: get("--line"), panel: get("--panel"), stripe: get("--stripe"), accent: get("--accent"), wait: get("--wait"), waitFill: get("--wait-fill"), sans: get("--sans") };
    colours.family = meta.families.map(([n, c]) => (n === "control" ? get("--control") : c));
    const rgb = (c) => [1, 3, 5].map((at) => parseInt(c.slice(at, at + 2), 16));
    const packed = (c) => { const [r, g, b] = rgb(c); return (255 << 24 | b << 16 | g << 8 | r) >>> 0; };
    const mix = (c, part) => "#" + rgb(c).map((v) => Math.round(v + (part > 0 ? 255 - v : v) * part).toString(16).padStart(2, "0")).join("");
    colours.shade = shades.map((op) => {
      const own = meta.instructions[op].family, family = shades.filter((o) => meta.instructions[o].family === own);
      return mix(colours.family[own], family.length > 1 ? 0.56 * (family.indexOf(op) / (family.length - 1)) - 0.28 : 0);
    });
    colours.ink = colours.shade.map((c) => { const [r, g, b] = rgb(c); return 0.299 * r + 0.587 * g + 0.114 * b > 150 ? "#10131a" : "#ffffff"; });
    colours.shade32 = colours.shade.map(packed);
    colours.page32 = packed(get("--page")); colours.stripe32 = packed(get("--stripe")); colours.wait32 = packed(get("--wait"));
    const tile = document.createElement("canvas"), n = Math.round(7 * size.k), g = tile.getContext("2d");
    tile.width = tile.height = n;
    g.fillStyle = colours.waitFill; g.fillRect(0, 0, n, n);
    g.strokeStyle = colours.wait; g.lineWidth = Math.max(1, 0.9 * size.k); g.globalAlpha = 0.75;
    g.beginPath();
    for (const at of [-n, 0, n]) { g.moveTo(at - 1, n + 1); g.lineTo(at + n + 1, -1); }
    g.stroke();
    colours.hatch = ctx.createPattern(tile, "repeat");
    overview = null;
    summary(); legend(); details(); samples(); request();
  }
  function samples() {
    const k = window.devicePixelRatio || 1;
    const sheet = (id) => { const c = $(id); c.width = 120 * k; c.height = 44 * k; c.style.width = "120px"; return c.getContext("2d"); };
    const matmul = colours.family[meta.families.findIndex((f) => f[0] === "matmul")];
    let g = sheet("sampleBar"); paintShape(g, CLASS.work, matmul, 0, 6 * k, 120 * k, 30 * k, k);
    g.font = `${11 * k}px ${colours.sans}`; g.fillStyle = "#fff"; g.fillText("gate_up_silu  [3]", 8 * k, 25 * k);
    g = sheet("sampleWait"); paintShape(g, CLASS.wait, "", 0, 6 * k, 120 * k, 30 * k, k);
    g = sheet("sampleLoad"); paintShape(g, CLASS.wait, "", 0, 2 * k, 70 * k, 30 * k, k); paintShape(g, CLASS.work, matmul, 71 * k, 2 * k, 49 * k, 30 * k, k); paintShape(g, CLASS.load, matmul, 20 * k, 35 * k, 50 * k, 6 * k, k);
    g = sheet("sampleColumns");
    for (let x = 0; x < 120; x += 2) {
      const tall = 14 + 12 * Math.sin(x / 9) ** 2;
      paintShape(g, CLASS.load, matmul, x * k, (40 - tall) * k, 2 * k, tall * k, k);
      paintShape(g, CLASS.load, colours.wait, x * k, 8 * k, 2 * k, (32 - tall) * k, k);
    }
  }
  const toggleTheme = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  function togglePath() {
    showPath = !showPath;
    $("path").setAttribute("aria-pressed", showPath);
    request();
  }

  // -- events
  let drag = null;
  const position = (e) => { const r = canvas.getBoundingClientRect(); return [(e.clientX - r.left) * size.k, (e.clientY - r.top) * size.k]; };
  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const [x, y] = position(e), amount = e.deltaMode ? e.deltaY * 30 : e.deltaY;
    if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) pan(((e.deltaX || amount) / size.w) * size.k);
    else if (x < gutter() && y > top()) scrollLanes(amount * size.k);
    else zoom(Math.exp(amount * 0.0016), Math.min(Math.max(toTime(x), view.t0), view.t1));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (e) => {
    const [x, y] = position(e);
    canvas.setPointerCapture(e.pointerId);
    drag = { x, y, moved: false, brush: y < strip().y + strip().h + 2 && x >= gutter(), t0: view.t0, t1: view.t1, scroll: view.scroll };
    if (drag.brush) brush(x);
  });
  function brush(x) {
    const t = ((x - strip().x) / strip().w) * meta.span, half = (view.t1 - view.t0) / 2;
    setView(t - half, t + half);
  }
  canvas.addEventListener("pointermove", (e) => {
    const [x, y] = position(e);
    if (drag) {
      if (Math.hypot(x - drag.x, y - drag.y) > 3 * size.k) drag.moved = true;
      if (drag.brush) brush(x);
      else if (drag.moved) {
        canvas.classList.add("drag");
        const shift = (drag.x - x) / scale();
        setView(drag.t0 + shift, drag.t1 + shift);
        view.scroll = drag.scroll;
        scrollLanes(drag.y - y);
      }
      return;
    }
    const now = hit(x, y);
    if (now !== hovered) { hovered = now; request(); }
    tooltip(x / size.k, y / size.k);
  });
  canvas.addEventListener("pointerup", (e) => {
    const [x, y] = position(e);
    if (drag && !drag.moved && !drag.brush) select(hit(x, y));
    drag = null;
    canvas.classList.remove("drag");
  });
  canvas.addEventListener("pointerleave", () => { hovered = -1; tooltip(); request(); });
  canvas.addEventListener("dblclick", (e) => { const i = hit(...position(e)); if (i >= 0) zoomTo(i); });
  document.addEventListener("click", (e) => {
    const target = e.target.closest("[data-select], [data-find], [data-toggle]");
    if (!target) return;
    const { select: chosen, find: wanted, toggle } = target.dataset;
    if (chosen) choose(Number(chosen));
    if (wanted) { $("search").value = $("search").value === wanted ? "" : wanted; find($("search").value); }
    if (toggle) {
      const key = /^\d+$/.test(toggle) ? Number(toggle) : toggle;
      if (!hidden.delete(key)) hidden.add(key);
      overview = null; legend(); request();
    }
  });
  const keys = {
    w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
    a: () => pan(-0.2), d: () => pan(0.2), ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
    ArrowUp: () => scrollLanes(-laneHeight()), ArrowDown: () => scrollLanes(laneHeight()),
    0: fit, f: fit, c: togglePath, t: toggleTheme, n: () => step(1), N: () => step(-1),
    r: () => { const wait = selected < 0 ? -1 : isWait(selected) ? selected : waitOf(selected); if (wait >= 0 && releaser[wait] >= 0) choose(releaser[wait]); },
    "/": () => $("search").focus(), "?": () => $("guide").showModal(),
    Escape: () => { $("search").value = ""; find(""); select(-1); },
  };
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || $("guide").open) return;
    if (e.target === $("search")) {
      if (e.key === "Enter") step(e.shiftKey ? -1 : 1);
      else if (e.key === "Escape") { keys.Escape(); canvas.focus(); }
      else return;
    } else if (keys[e.key]) keys[e.key]();
    else return;
    e.preventDefault();
  });
  $("search").addEventListener("input", () => find($("search").value));
  $("fit").addEventListener("click", fit);
  $("path").addEventListener("click", togglePath);
  $("theme").addEventListener("click", toggleTheme);
  $("help").addEventListener("click", () => $("guide").showModal());

  function resize() {
    const k = window.devicePixelRatio || 1, w = Math.max(1, Math.round(canvas.clientWidth * k)), h = Math.max(1, Math.round(canvas.clientHeight * k));
    const zoomed = k !== size.k;
    if (w === size.w && h === size.h && !zoomed && base) return;
    size = { w, h, k };
    canvas.width = w; canvas.height = h;
    const image = ctx.createImageData(w, h);
    base = { image, pixels: new Uint32Array(image.data.buffer) };
    overview = null;
    if (zoomed && colours.text) theme(document.documentElement.dataset.theme);
    scrollLanes(0);
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  theme(dark.matches ? "dark" : "light");
  new ResizeObserver(resize).observe(canvas);
  resize();
  fit();
  draw();

  window.timeline = {
    laneCount: lanes,
    intervalCount: count,
    visibleRange: () => [view.t0 * meta.unit_s, view.t1 * meta.unit_s],
    select: choose,
    selected: () => selected,
    find,
    frameMs: () => { draw(); return lastFrame; },
    /** Middle of an interval in CSS pixels of the page, and what it is. */
    locate(i) {
      const r = barBox(i, laneHeight(), boxes(laneHeight())), at = canvas.getBoundingClientRect();
      return { x: at.left + (r.x + r.w / 2) / size.k, y: at.top + (r.y + r.h / 2) / size.k, width: r.w / size.k };
    },
    describe: (i) => ({ name: instructionOf(i).name, kind: meta.kinds[kind[i]], layer: place(i), lane: lane[i], begin_s: begin[i] * meta.unit_s, duration_s: length[i] * meta.unit_s, releaser: releaser[i], cause: isWait(i) ? cause(i) : "", operands: Object.fromEntries(operands(record[i])) }),
  };

  /** base64 of deflated columns -> typed arrays. */
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
})();
