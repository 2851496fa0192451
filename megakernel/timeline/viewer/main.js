// Colours, size, start.

function theme(name) {
  document.documentElement.dataset.theme = name;
  const css = getComputedStyle(document.documentElement), get = (n) => css.getPropertyValue(n).trim();
  const rgb = (c) => [1, 3, 5].map((at) => parseInt(c.slice(at, at + 2), 16));
  const packed = (c) => { const [r, g, b] = rgb(c); return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0; };
  const hex = (values) => "#" + values.map((v) => Math.round(v).toString(16).padStart(2, "0")).join("");
  const blend = (a, b, part) => { const from = rgb(a), to = rgb(b); return hex(from.map((v, n) => v + (to[n] - v) * part)); };
  colours = { page: get("--page"), text: get("--text"), dim: get("--dim"), line: get("--line"), panel: get("--panel"), stripe: get("--stripe"), accent: get("--accent"), wait: get("--wait"), waitFill: get("--wait-fill"), sans: get("--sans") };
  colours.family = meta.families.map(([n, c]) => (n === "control" ? get("--control") : c));
  colours.shade = meta.phases.map((phase) => {
    const siblings = meta.phases.filter((p) => p.family === phase.family);
    const part = siblings.length > 1 ? 0.56 * (siblings.indexOf(phase) / (siblings.length - 1)) - 0.28 : 0;
    return blend(colours.family[phase.family], part > 0 ? "#ffffff" : "#000000", Math.abs(part));
  });
  colours.ink = colours.shade.map((c) => { const [r, g, b] = rgb(c); return 0.299 * r + 0.587 * g + 0.114 * b > 150 ? "#10131a" : "#ffffff"; });
  colours.curve = blend(colours.page, colours.text, 0.55);
  for (const n of ["page", "panel", "stripe", "line", "wait", "waitFill", "curve", "accent"]) colours[`${n}32`] = packed(colours[n]);
  colours.band32 = packed(blend(colours.page, colours.text, 0.2));
  colours.part32 = [...colours.shade, colours.wait].map(packed);
  colours.dimmed32 = [...colours.shade, colours.wait].map((c) => packed(blend(colours.page, c, 0.13)));
  colours.dimGround32 = packed(blend(colours.page, colours.waitFill, 0.3));
  overview = null;
  summary(); legend(); details(); measured(); samples(); request();
}
const toggleTheme = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

/** Draw the sample shapes that the guide explains. */
function samples() {
  const k = window.devicePixelRatio || 1, accent = colours.accent;
  const sheet = (id) => { const c = $(id); c.width = 120 * k; c.height = 44 * k; c.style.width = "120px"; const g = c.getContext("2d"); g.scale(k, k); return g; };
  const hue = (name) => colours.family[meta.families.findIndex(([n]) => n === name)], matmul = hue("matmul"), norm = hue("norm");
  const box = (g, colour, x, y, w, h) => { g.fillStyle = colour; g.fillRect(x, y, w, h); };
  const waiting = (g, x, y, w, h) => {
    box(g, colours.waitFill, x, y, w, h);
    g.save(); g.beginPath(); g.rect(x, y, w, h); g.clip();
    g.strokeStyle = colours.wait; g.beginPath();
    for (let d = -h; d < w; d += 7) { g.moveTo(x + d, y + h); g.lineTo(x + d + h, y); }
    g.stroke(); g.restore();
    g.strokeStyle = colours.wait; g.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
  };
  let g = sheet("sampleBar"); box(g, matmul, 0, 6, 120, 30);
  g.font = `11px ${colours.sans}`; g.fillStyle = "#fff"; g.fillText("a matmul  [3]", 8, 25);
  g = sheet("sampleWait"); waiting(g, 0, 6, 120, 30);
  g = sheet("sampleLoad"); box(g, norm, 14, 1, 34, 5); waiting(g, 0, 8, 70, 26); box(g, matmul, 71, 8, 49, 26); box(g, matmul, 20, 37, 50, 6);
  g = sheet("sampleColumns");
  for (let x = 0; x < 120; x += 2) {
    const tall = 14 + 12 * Math.sin(x / 9) ** 2;
    box(g, matmul, x, 40 - tall, 2, tall);
    box(g, colours.wait, x, 8, 2, 32 - tall);
  }
  g = sheet("sampleArrow"); box(g, matmul, 0, 2, 70, 14); waiting(g, 40, 26, 52, 14); box(g, matmul, 93, 26, 27, 14);
  g.strokeStyle = g.fillStyle = accent; g.lineWidth = 2;
  g.beginPath(); g.moveTo(70, 9); g.bezierCurveTo(84, 9, 72, 33, 84, 33); g.stroke();
  g.beginPath(); g.moveTo(92, 33); g.lineTo(83, 28); g.lineTo(83, 38); g.fill();
  g.beginPath(); g.arc(70, 9, 3, 0, 7); g.fill();
  g = sheet("sampleCurve");
  for (let x = 0; x < 120; x++) {
    const tall = 12 + 10 * Math.sin(x / 17) + 3 * Math.sin(x / 4);
    box(g, colours.line, x, 40 - tall - 7, 1, tall + 7);
    box(g, colours.curve, x, 40 - tall, 1, tall);
  }
}

function resize() {
  const k = window.devicePixelRatio || 1, w = Math.max(1, Math.round(canvas.clientWidth * k)), h = Math.max(1, Math.round(canvas.clientHeight * k));
  if (w === size.w && h === size.h && k === size.k && base) return;
  size = { w, h, k };
  canvas.width = w; canvas.height = h; font = "";
  const image = ctx.createImageData(w, h);
  base = { image, pixels: new Uint32Array(image.data.buffer) };
  overview = null;
  relay();
}
const dark = window.matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
for (const element of document.querySelectorAll(".comparing")) element.hidden = sources.length < 2;
resize();
theme(dark.matches ? "dark" : "light");
headline();
new ResizeObserver(resize).observe(canvas);
if (!showLinked()) fit();
draw();
