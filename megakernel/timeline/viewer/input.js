// Input from keyboard and pointer: it moves the view and selects intervals.

const shownSpan = (span) => Math.min(Math.max(span, 20), meta.span * 1.02);
function setView(t0, t1) {
  const span = shownSpan(t1 - t0), margin = meta.span * 0.01;
  t0 = Math.min(Math.max(t0, -margin), meta.span + margin - span);
  view.t0 = t0; view.t1 = t0 + span;
  request();
  keepView();
}
// The page's address contains the visible range and the selection, so that somebody who opens a copied link sees both.
let keeping = 0;
function keepView() {
  clearTimeout(keeping);
  keeping = setTimeout(() => history.replaceState(null, "", `#${[view.t0, view.t1].map(Math.round).join("-")}${selected >= 0 ? `-${selected}` : ""}`), 200);
}
function showLinked() {
  const found = /^#(-?\d+)-(-?\d+)(?:-(\d+))?$/.exec(location.hash);
  if (!found) return false;
  if (found[3]) choose(Number(found[3]));
  setView(Number(found[1]), Number(found[2]));
  return true;
}
const fit = () => { view.scroll = 0; setView(-meta.span * 0.005, meta.span * 1.01); };
const pan = (part) => setView(view.t0 + part * (view.t1 - view.t0), view.t1 + part * (view.t1 - view.t0));
function zoom(factor, at = (view.t0 + view.t1) / 2) {
  const span = shownSpan((view.t1 - view.t0) * factor), left = at - ((at - view.t0) / (view.t1 - view.t0)) * span;
  setView(left, left + span);
}
function scrollRows(by) {
  view.scroll = Math.min(Math.max(view.scroll + by, 0), Math.max(0, rowsHeight - (size.h - rowsTop())));
  request();
}
const showAround = (t, span) => setView(t - span / 2, t + span / 2);
const middleOf = (i) => begin[i] + length[i] / 2;
const zoomTo = (i) => showAround(middleOf(i), Math.max(length[i], 1) * 6);
function reveal(i) {
  if (begin[i] < view.t0 || endOf(i) > view.t1) showAround(middleOf(i), Math.max(view.t1 - view.t0, length[i] * 1.5));
  bringRow(rowOf(i));
}
/** Scroll no further than necessary to show a row completely, below its rank's header. */
function bringRow(row) {
  const top = rowsTop() + (row.header?.h ?? 0), y = rowsTop() + row.y - view.scroll;
  if (y < top) scrollRows(y - top);
  else if (y + row.h > size.h) scrollRows(y + row.h - size.h);
}
function select(i) {
  selected = i >= 0 && i < count ? i : -1;
  details();
  request();
  keepView();
}
/** Select interval i and scroll to it. If its worker has no row yet, open the row of its rank. */
function choose(i) {
  select(i);
  if (selected < 0) return;
  if (rowOf(i).type === "rank") toggleRow(rowOf(i));
  reveal(i);
}
function toggleRow(row) {
  if (!opened.delete(row.key)) opened.add(row.key);
  relay();
}
/** The row at height y of the canvas. */
const rowUnder = (y) => (y < rowsTop() ? undefined : stuck && y < rowY(stuck) + stuck.h ? stuck : rowAt(y - rowsTop() + view.scroll));

/** The interval at a point, or -1. */
function hit(x, y) {
  const row = rowUnder(y);
  if (x < gutter() || !row || row.type === "rank") return -1;
  const box = boxes(row), inside = y - rowY(row), t = toTime(x), slop = 2 / scale(), l = row.lane0;
  const roles = row.role >= 0 ? [row.role] : rolesOf(l);
  let shapes = [SHAPE.work, SHAPE.wait];
  if (row.role >= 0) shapes = [SHAPE.work, SHAPE.store, SHAPE.load, SHAPE.wait];
  else if (box.strip && inside >= box.loadY - size.k) shapes = [SHAPE.load];
  else if (box.strip && box.storeY < box.y - 1 && inside < box.y) shapes = [SHAPE.store];
  const best = [-1, -1, -1, -1], off = [slop, slop, slop, slop];
  for (const r of roles) {
    const g = l * ROLES + r;
    for (let n = firstReaching(reach, groupStart[g], groupStart[g + 1], t - slop); n < groupStart[g + 1] && begin[order[n]] <= t + slop; n++) {
      const i = order[n], s = shapeOf[i], d = Math.max(begin[i] - t, t - endOf(i), 0);
      if (!hiddenAt(i) && (best[s] < 0 ? d <= slop : d < off[s] || (d === 0 && length[i] < length[best[s]]))) { best[s] = i; off[s] = d; }
    }
  }
  const found = best[shapes.filter((s) => best[s] >= 0).sort((a, b) => off[a] - off[b] || shapes.indexOf(a) - shapes.indexOf(b))[0] ?? SHAPE.work];
  // If several waits overlap at this point, return the one whose label is shown.
  const n = row.role < 0 && found >= 0 && isWait(found) ? firstReaching(pieceEnd, pieceStart[l], pieceStart[l + 1], t) : -1;
  return n >= 0 && n < pieceStart[l + 1] && pieceBegin[n] <= t && isWait(pieceOf[n]) ? pieceOf[n] : found;
}

function togglePath() {
  showPath = !showPath;
  $("path").setAttribute("aria-pressed", showPath);
  forgetBins();
  request();
}
function toggleCurves() { curvesShown = !curvesShown; relay(); }
function growRows(factor) {
  rowScale = Math.min(Math.max(rowScale * factor, 0.25), 8);
  relay();
}
/** Shift the second trace so that the selected instruction begins at the same time in both; without one, undo. */
function align() {
  if (sources.length < 2) return;
  const b = sources[1], pair = selected >= 0 && twin[selected] >= 0 ? [selected, twin[selected]].sort((x, y) => x - y) : null;
  const by = pair ? begin[pair[0]] - begin[pair[1]] : -b.shift;
  for (let i = b.first; i < b.first + b.intervals; i++) begin[i] += by;
  for (let n = pieceStart[b.lane0]; n < pieceBegin.length; n++) { pieceBegin[n] += by; pieceEnd[n] += by; }
  b.shift += by;
  measureReach();
  forgetBins();
  overview = null;
  details();
  request();
}

// -- measuring: the pointer snaps to the edges of the interval below it
function moment(x, y) {
  const t = toTime(x), i = hit(x, y), near = 6 * size.k;
  const edges = i < 0 ? [] : [begin[i], endOf(i)].filter((e) => Math.abs(toX(e) - x) <= near);
  return edges.sort((a, b) => Math.abs(a - t) - Math.abs(b - t))[0] ?? t;
}
function mark(t) {
  measure = measure && !measure.done ? { a: measure.a, b: t, done: true } : { a: t, b: t, done: false };
  measured();
  request();
}

let drag = null, pointer = null; // pointer: its position if it is over the canvas
const position = (e) => { const r = canvas.getBoundingClientRect(); return [(e.clientX - r.left) * size.k, (e.clientY - r.top) * size.k]; };
canvas.addEventListener("wheel", (e) => {
  e.preventDefault();
  const [x, y] = position(e), amount = e.deltaMode ? e.deltaY * 30 : e.deltaY;
  if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) pan(((e.deltaX || amount) / size.w) * size.k);
  else if (x < gutter() && y > rowsTop()) scrollRows(amount * size.k);
  else zoom(Math.exp(amount * 0.0016), Math.min(Math.max(toTime(x), view.t0), view.t1));
}, { passive: false });
canvas.addEventListener("pointerdown", (e) => {
  const [x, y] = position(e);
  canvas.setPointerCapture(e.pointerId);
  drag = { x, y, moved: false, brush: y < strip().y + strip().h + 2 && x >= gutter(), measuring: e.shiftKey && x >= gutter(), t0: view.t0, t1: view.t1, scroll: view.scroll };
  if (drag.brush) brush(x);
  else if (drag.measuring) { const t = moment(x, y); measure = { a: t, b: t, done: true }; }
});
const brush = (x) => showAround(((x - strip().x) / strip().w) * meta.span, view.t1 - view.t0);
canvas.addEventListener("pointermove", (e) => {
  const [x, y] = position(e);
  pointer = [x, y];
  if (drag) {
    if (Math.hypot(x - drag.x, y - drag.y) > 3 * size.k) drag.moved = true;
    if (drag.brush) brush(x);
    else if (drag.measuring) { measure.b = moment(x, y); request(); }
    else if (drag.moved) {
      canvas.classList.add("drag");
      const shift = (drag.x - x) / scale();
      setView(drag.t0 + shift, drag.t1 + shift);
      view.scroll = drag.scroll;
      scrollRows(drag.y - y);
    }
    return;
  }
  const now = hit(x, y);
  if (measure && !measure.done) { measure.b = moment(x, y); request(); }
  if (now !== hovered) { hovered = now; request(); }
  canvas.style.cursor = (x < gutter() && rowUnder(y)?.openable) || layerLineAt(y) ? "pointer" : "";
  tooltip(x / size.k, y / size.k, rowUnder(y), x >= gutter() ? trackAt(y) : -1, x >= gutter() ? layerLineAt(y) : undefined);
});
canvas.addEventListener("pointerup", (e) => {
  const [x, y] = position(e), row = rowUnder(y);
  if (drag && drag.measuring) {
    if (measure.a === measure.b) measure = null;
    measured();
    request();
  } else if (drag && !drag.moved && !drag.brush && layerLineAt(y)) {
    const block = x < gutter() ? null : blockAt(layerLineAt(y), toTime(x));
    if (block) showBlock(block);
    else if (x < gutter()) toggleLayers();
  } else if (drag && !drag.moved && !drag.brush) {
    if (row?.openable && (x < gutter() || row.type === "rank")) toggleRow(row);
    else select(hit(x, y));
  }
  drag = null;
  canvas.classList.remove("drag");
});
canvas.addEventListener("pointerleave", () => { hovered = -1; pointer = null; tooltip(0, 0); request(); });
canvas.addEventListener("dblclick", (e) => { const i = hit(...position(e)); if (i >= 0) zoomTo(i); });
document.addEventListener("click", (e) => {
  const target = e.target.closest("[data-select], [data-find], [data-toggle], [data-walk]");
  if (!target) return;
  const { select: wantedInterval, find: wanted, toggle, walk: list } = target.dataset;
  if (wantedInterval) choose(Number(wantedInterval));
  if (list) walk(Number(list), 1);
  if (wanted) { $("search").value = $("search").value === wanted ? "" : wanted; find($("search").value); }
  if (toggle) {
    const key = /^\d+$/.test(toggle) ? Number(toggle) : toggle;
    if (!hidden.delete(key)) hidden.add(key);
    overview = null; legend(); request();
  }
});
function released() {
  const wait = waitOf(selected);
  if (wait >= 0 && releaser[wait] >= 0) choose(releaser[wait]);
}
/** Select the previous or next interval in the same lane and role; if none is selected, the first visible one. */
function neighbour(by) {
  if (selected < 0) { choose(firstInSight()); return; }
  const g = lane[selected] * ROLES + role[selected];
  const at = order.subarray(groupStart[g], groupStart[g + 1]).indexOf(selected) + by;
  if (at >= 0 && groupStart[g] + at < groupStart[g + 1]) choose(order[groupStart[g] + at]);
}
function firstInSight() {
  const row = rows[cursor] ?? rowAt(view.scroll), l = row?.lane0 ?? 0;
  let best = -1;
  for (let n = groupStart[l * ROLES]; n < groupStart[(l + 1) * ROLES]; n++) {
    const i = order[n];
    if (endOf(i) >= view.t0 && shapeOf[i] === SHAPE.work && (best < 0 || begin[i] < begin[best])) best = i;
  }
  return best;
}
function moveCursor(by) {
  cursor = Math.min(Math.max(cursor < 0 ? rows.indexOf(rowAt(view.scroll)) : cursor + by, 0), rows.length - 1);
  bringRow(rows[cursor]);
  request();
}
/** The row that a key acts on: the row under the pointer, else at the cursor, else of the selected interval. */
function rowAtHand() {
  return (pointer && rowUnder(pointer[1])) || rows[cursor] || (selected >= 0 ? rowOf(selected) : rowAt(view.scroll));
}
/** Mark the time at the pointer. If it is not on the canvas, mark the selected interval's begin, then its end. */
function markHere() {
  if (pointer) mark(moment(...pointer));
  else if (selected >= 0) mark(measure && !measure.done ? endOf(selected) : begin[selected]);
}
const keys = {
  w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
  a: () => pan(-0.2), d: () => pan(0.2), ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
  ArrowUp: () => scrollRows(-60 * size.k), ArrowDown: () => scrollRows(60 * size.k),
  PageUp: () => scrollRows(rowsTop() - size.h), PageDown: () => scrollRows(size.h - rowsTop()),
  0: fit, f: fit, c: togglePath, g: toggleCurves, t: () => toggleTheme(), n: () => stepMatch(1), N: () => stepMatch(-1),
  r: released, z: () => { if (selected >= 0) zoomTo(selected); }, ",": () => neighbour(-1), ".": () => neighbour(1),
  b: () => { if (selected >= 0 && twin[selected] >= 0) choose(twin[selected]); }, l: align,
  e: () => { const row = rowAtHand(); if (row?.openable) toggleRow(row); }, E: () => { openMore(); relay(); },
  "[": () => growRows(1 / 1.3), "]": () => growRows(1.3),
  y: toggleLayers, u: () => stepLayer(-1), i: () => stepLayer(1),
  m: markHere, j: () => moveCursor(1), k: () => moveCursor(-1),
  p: () => { if (walking !== null) walk(walking, 1); }, P: () => { if (walking !== null) walk(walking, -1); },
  "/": () => $("search").focus(), "?": () => $("guide").showModal(),
  Escape: () => { clearTimeout(typed); typed = 0; cursor = -1; $("search").value = ""; measure = null; measured(); find(""); select(-1); },
};
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || $("guide").open) return;
  if (e.target === $("search")) {
    // After a search, the timeline gets the keyboard focus again.
    if (e.key === "Enter") { findNow(); stepMatch(e.shiftKey ? -1 : 1); canvas.focus(); }
    else if (e.key === "Escape") { keys.Escape(); canvas.focus(); }
    else return;
  } else if (keys[e.key]) keys[e.key]();
  else return;
  e.preventDefault();
});
// A search examines all intervals, so it starts only when the user pauses typing.
const PAUSE_MS = 60;
let typed = 0;
function findNow() {
  clearTimeout(typed);
  if (!typed) return;
  typed = 0;
  find($("search").value);
}
$("search").addEventListener("input", () => { clearTimeout(typed); typed = setTimeout(findNow, PAUSE_MS); });
const buttons = { fit, path: togglePath, theme: () => toggleTheme(), help: () => $("guide").showModal() };
for (const [id, act] of Object.entries(buttons)) $(id).addEventListener("click", act);
