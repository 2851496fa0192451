// The rows of the timeline (ranks, their workers, and the workers' roles), which of them are open, and their positions.

// `order` lists all intervals, sorted by (lane, role, begin). In it, `groupStart` has the start of each (lane, role).
const groupStart = new Uint32Array(lanes * ROLES + 1), order = new Uint32Array(count);
{
  for (let i = 0; i < count; i++) groupStart[lane[i] * ROLES + role[i] + 1]++;
  for (let g = 0; g < lanes * ROLES; g++) groupStart[g + 1] += groupStart[g];
  const next = groupStart.slice();
  for (let i = 0; i < count; i++) order[next[lane[i] * ROLES + role[i]]++] = i;
}
// `reach` has the latest end of each interval and all earlier ones of its (lane, role). With it, a binary search finds
// the first interval that extends beyond a given time.
const reach = new Float64Array(count);
function measureReach() {
  for (let g = 0; g < lanes * ROLES; g++) {
    let latest = -Infinity;
    for (let n = groupStart[g]; n < groupStart[g + 1]; n++) reach[n] = latest = Math.max(latest, endOf(order[n]));
  }
}
measureReach();
/** The first n of [low, high) for which before(n) is false, or `high`. Beyond that n, before(n) must stay false. */
function bisect(low, high, before) {
  while (low < high) {
    const mid = (low + high) >> 1;
    if (before(mid)) low = mid + 1; else high = mid;
  }
  return low;
}
const firstReaching = (ends, low, high, t) => bisect(low, high, (n) => ends[n] < t);

const MANY_LANES = 24; // up to this many lanes (workers), all ranks are open at first; with more workers per rank, rows are lower
const ROW = { rank: { least: 44, most: 150 }, open: { least: 22, most: 40 }, worker: { least: 18, most: 128 }, dense: { least: 6, most: 16 }, role: { least: 15, most: 30 } };
const ranked = sources.some((s) => s.ranks > 1);
const opened = new Set();
let rows = [], cursor = -1, laneRow = new Int32Array(lanes), roleRow = new Int32Array(lanes * ROLES), rowScale = 1, rowsHeight = 0;

const rankKey = (s, rank) => `rank ${sources.indexOf(s)} ${rank}`;
const workerKey = (l) => `worker ${l}`;
if (ranked && lanes <= MANY_LANES) for (const s of sources) for (let r = 0; r < s.ranks; r++) opened.add(rankKey(s, r));

const rolesOf = (l) => [...meta.roles.keys()].filter((r) => groupStart[l * ROLES + r + 1] > groupStart[l * ROLES + r]);
/** Make the rows that `opened` asks for. Together they fill `room` device pixels if possible. `k` is device pixels per CSS pixel. */
function layRows(room, k) {
  rows = [];
  laneRow.fill(-1); roleRow.fill(-1);
  const most = Math.max(...sources.map((s) => s.ranks));
  if (ranked) {
    for (let r = 0; r < most; r++) {
      for (const s of sources.filter((x) => r < x.ranks)) {
        const from = s.lane0 + r * s.workers, key = rankKey(s, r), isOpen = opened.has(key);
        const header = { key, type: "rank", size: isOpen ? ROW.open : ROW.rank, source: s, lane0: from, lane1: from + s.workers, role: -1, depth: 0, text: `${s.letter} rank ${r}`.trim(), openable: true, isOpen };
        rows.push(header);
        if (!isOpen) continue;
        for (let l = from; l < from + s.workers; l++) addWorker(s, l);
        for (let n = rows.indexOf(header) + 1; n < rows.length; n++) rows[n].header = header;
      }
    }
  } else {
    const widest = Math.max(...sources.map((s) => s.workers));
    for (let w = 0; w < widest; w++) for (const s of sources) if (w < s.workers) addWorker(s, s.lane0 + w);
  }
  const least = rows.reduce((sum, r) => sum + r.size.least, 0) * k, grow = Math.max(1, room / least);
  let y = 0;
  for (const [n, r] of rows.entries()) {
    r.n = n;
    r.h = Math.max(2, Math.round(Math.min(r.size.most * k, Math.floor(r.size.least * k * grow)) * rowScale));
    r.y = y;
    y += r.h;
    if (r.header) r.header.end = y;
  }
  rowsHeight = y;
}
function addWorker(s, l) {
  const roles = rolesOf(l), openable = roles.length > 1, isOpen = openable && opened.has(workerKey(l));
  laneRow[l] = rows.length;
  const dense = s.workers > MANY_LANES && !isOpen;
  rows.push({ key: workerKey(l), type: "worker", size: dense ? ROW.dense : ROW.worker, source: s, lane0: l, lane1: l + 1, role: -1, depth: ranked ? 1 : 0, text: `${s.letter} worker ${workerOfLane(l)}`.trim(), openable, isOpen });
  if (!isOpen) return;
  for (const r of roles) {
    roleRow[l * ROLES + r] = rows.length;
    rows.push({ key: `role ${l} ${r}`, type: "role", size: ROW.role, source: s, lane0: l, lane1: l + 1, role: r, depth: ranked ? 2 : 1, text: meta.roles[r], openable: false, isOpen: false });
  }
}
/** The innermost row that shows interval i. */
function rowOf(i) {
  const own = roleRow[lane[i] * ROLES + role[i]];
  if (own >= 0) return rows[own];
  if (laneRow[lane[i]] >= 0) return rows[laneRow[lane[i]]];
  return rows.find((r) => r.type === "rank" && lane[i] >= r.lane0 && lane[i] < r.lane1);
}
/** The row that is y pixels below the top of the first row, or undefined. */
function rowAt(y) {
  return y >= 0 ? rows[bisect(0, rows.length, (n) => rows[n].y + rows[n].h <= y)] : undefined;
}
/** Open every rank. If all ranks are open, open every worker. If all workers are open too, close everything. */
function openMore() {
  const all = (keys) => keys.length > 0 && keys.every((k) => opened.has(k));
  const ranks = ranked ? sources.flatMap((s) => Array.from({ length: s.ranks }, (_, r) => rankKey(s, r))) : [];
  const workers = Array.from({ length: lanes }, (_, l) => l).filter((l) => rolesOf(l).length > 1).map(workerKey);
  if (ranks.length && !all(ranks)) ranks.forEach((k) => opened.add(k));
  else if (workers.length && !all(workers)) workers.forEach((k) => opened.add(k));
  else opened.clear();
}
