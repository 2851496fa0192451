// Functions that tests and benchmarks call on a timeline page. browser.py appends this file to the page's script, so
// that it can use every name in the script.

window.timeline = {
  laneCount: lanes,
  intervalCount: count,
  rows: () => rows.map((r) => ({ key: r.key, type: r.type, text: r.text, open: r.isOpen, height: r.h / size.k, y: rowY(r) / size.k })),
  toggle: (key) => toggleRow(rows.find((r) => r.key === key)),
  visibleRange: () => [view.t0 * meta.unit_s, view.t1 * meta.unit_s],
  show: (from, to) => setView(from / meta.unit_s, to / meta.unit_s),
  select: choose,
  /** Scroll vertically until the row of interval i is in the middle of the view. */
  showRow: (i) => scrollRows(rowY(rowOf(i)) + rowOf(i).h / 2 - (rowsTop() + size.h) / 2),
  scroll: (pixels) => { view.scroll = 0; scrollRows(pixels * size.k); },
  /** Return [begin, end] in seconds of a layer, such as "layer 3", or of `phase` in that layer if it is given. */
  block(name, phase) {
    const shade = meta.phases.findIndex((p) => p.name === phase);
    const { t0, t1 } = [...blocksOf({ s: sources[0], shade }, -Infinity, Infinity)].find((b) => b.name === name);
    return [t0 * meta.unit_s, t1 * meta.unit_s];
  },
  selected: () => selected,
  find,
  frameMs: () => { const started = performance.now(); draw(); return performance.now() - started; },
  measured: () => (measure ? [Math.min(measure.a, measure.b) * meta.unit_s, Math.max(measure.a, measure.b) * meta.unit_s] : null),
  tracks: () => tracks.map((t) => t.name),
  /** Return the mean rate of a resource between two times in seconds, as a fraction of its peak. `source` is the index of the trace. */
  rate: (source, name, from, to) => meanRate(sources[source], tracks.find((t) => t.name === name).r, from / meta.unit_s, to / meta.unit_s),
  /** Return the fraction of a row's time that it spends on each phase and on "waiting", by name. `from` and `to` are in seconds. */
  shares(key, from, to) {
    const row = rows.find((r) => r.key === key), t0 = from / meta.unit_s, t1 = to / meta.unit_s;
    const { sums } = rowShare(row, new Share(1), t0, 1 / (t1 - t0), false);
    return Object.fromEntries([...sums].map((v, p) => [partName(p), v / (row.lane1 - row.lane0)]).filter(([, v]) => v > 0));
  },
  /** Return the centre and the width of the bar that shows interval i, in CSS pixels of the page. */
  locate(i) {
    const r = barBox(i), at = canvas.getBoundingClientRect();
    return { x: at.left + (r.x + r.w / 2) / size.k, y: at.top + (r.y + r.h / 2) / size.k, width: r.w / size.k };
  },
  describe: (i) => ({ interval: i, name: phaseOf(i).name, kind: meta.kinds[kind[i]], role: meta.roles[role[i]], layer: place(i), lane: lane[i], begin_s: begin[i] * meta.unit_s, duration_s: length[i] * meta.unit_s, releaser: releaser[i], twin: twin[i], cause: kind[i] === COUNTER_WAIT ? cause(i) : "", operands: Object.fromEntries(operands(record[i])) }),
};
