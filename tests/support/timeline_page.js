// What tests and benchmarks may ask of a timeline's page. Put at the end of its script, where all of it is in scope.

window.timeline = {
  laneCount: lanes,
  intervalCount: count,
  rows: () => rows.map((r) => ({ key: r.key, type: r.type, text: r.text, open: r.isOpen, height: r.h / size.k, y: rowY(r) / size.k })),
  toggle: (key) => toggleRow(rows.find((r) => r.key === key)),
  visibleRange: () => [view.t0 * meta.unit_s, view.t1 * meta.unit_s],
  show: (from, to) => setView(from / meta.unit_s, to / meta.unit_s),
  select: choose,
  /** Scroll the row of an interval to the middle. */
  showRow: (i) => scrollRows(rowY(rowOf(i)) + rowOf(i).h / 2 - (rowsTop() + size.h) / 2),
  scroll: (pixels) => { view.scroll = 0; scrollRows(pixels * size.k); },
  /** When a layer, or a phase in it, was computed. */
  block(name, phase) {
    const shade = meta.phases.findIndex((p) => p.name === phase);
    const { t0, t1 } = [...blocksOf({ s: sources[0], shade }, -Infinity, Infinity)].find((b) => b.name === name);
    return [t0 * meta.unit_s, t1 * meta.unit_s];
  },
  selected: () => selected,
  find,
  frameMs: () => { const started = performance.now(); draw(); return performance.now() - started; },
  arrows: () => arrowsInSight().length,
  measured: () => (measure ? [Math.min(measure.a, measure.b) * meta.unit_s, Math.max(measure.a, measure.b) * meta.unit_s] : null),
  tracks: () => tracks.map((t) => t.name),
  /** Mean share of its peak that a resource of a trace did between two moments in seconds. */
  rate: (source, name, from, to) => meanRate(sources[source], tracks.find((t) => t.name === name).r, from / meta.unit_s, to / meta.unit_s),
  /** Shares of a row's time between two moments, by part: names of phases and "waiting". */
  shares(key, from, to) {
    const row = rows.find((r) => r.key === key), t0 = from / meta.unit_s, t1 = to / meta.unit_s;
    const { sums } = rowShare(row, new Share(1), t0, 1 / (t1 - t0), false);
    return Object.fromEntries([...sums].map((v, p) => [partName(p), v / (row.lane1 - row.lane0)]).filter(([, v]) => v > 0));
  },
  /** Middle of an interval in CSS pixels of the page. */
  locate(i) {
    const r = barBox(i), at = canvas.getBoundingClientRect();
    return { x: at.left + (r.x + r.w / 2) / size.k, y: at.top + (r.y + r.h / 2) / size.k, width: r.w / size.k };
  },
  describe: (i) => ({ interval: i, name: phaseOf(i).name, kind: meta.kinds[kind[i]], role: meta.roles[role[i]], layer: place(i), lane: lane[i], begin_s: begin[i] * meta.unit_s, duration_s: length[i] * meta.unit_s, releaser: releaser[i], twin: twin[i], cause: kind[i] === COUNTER_WAIT ? cause(i) : "", operands: Object.fromEntries(operands(record[i])) }),
};
