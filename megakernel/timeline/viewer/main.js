// Sets the colours for a light or dark page, follows changes of the canvas's size, and draws the first frame.

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
  summary(); legend(); details(); measured(); request();
}
const toggleTheme = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

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
