// ---- the data
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const pooled = data.mode === "pooled";
const cellRows = pooled ? data.cells : data.queries;
const cellColumns = pooled ? data.cells : data.keys;

// A weight travels as a 16-bit code: 0 hidden, 1 a visible zero, and larger codes mean larger weights.
const fixedPoint = (code) => (code === 0 ? NaN : (code - 1) / 65534);

function scaledHalf(code) {
  if (code === 0) return NaN;
  const exponent = (code - 1) >> 10;
  const fraction = (code - 1) & 1023;
  return (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24) / 32768;
}
const weightOf = pooled ? scaledHalf : fixedPoint;

const decoded = new Map(); // heads are decoded when first looked at
function block(kind, sequence, layer, head, type = Uint16Array) {
  const key = `${kind}/${sequence}/${layer}/${head}`;
  if (!decoded.has(key)) {
    const raw = atob(data.layers[layer][kind][sequence][head]);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    decoded.set(key, new type(bytes.buffer));
  }
  return decoded.get(key);
}

// Map cells and tokens, as in adaptive pooling: where the length doesn't divide, neighbours share a token,
// which then counts to the later cell, so that a cell's first token leads back to that cell.
const edge = (cell, cells, length) => Math.floor((cell * length) / cells);
const lastOf = (cell, cells, length) => Math.ceil(((cell + 1) * length) / cells) - 1;
const cellOf = (token, cells, length) => Math.ceil(((token + 1) * cells) / length) - 1;
const rowOf = (query) => cellOf(query, cellRows, data.queries);
const columnOf = (key) => cellOf(key, cellColumns, data.keys);
const queryAt = (row) => Math.min(edge(row, cellRows, data.queries), data.queries - 1);
const keyAt = (column) => Math.min(edge(column, cellColumns, data.keys), data.keys - 1);

const queryTokens = () => data.tokens[state.sequence];
const keyTokens = () => (data.keyTokens || data.tokens)[state.sequence];

/** As the model counts them: a page may show some layers and heads only. */
const nameOf = (layer, head) => `L${data.layers[layer].number}H${data.layers[layer].numbers[head]}`;

function codesOf(layer, head) {
  return block(pooled ? state.map : "weights", state.sequence, layer, head);
}

/** What one query sees, strongest first: every visible key, or the exact top keys of a pooled report. */
function looksAt(query, layer = state.layer, head = state.head, sequence = state.sequence) {
  const found = [];
  if (pooled) {
    const weights = block("topWeights", sequence, layer, head);
    const keys = block("topKeys", sequence, layer, head, data.wide ? Uint32Array : Uint16Array);
    for (let i = query * data.top; i < (query + 1) * data.top; i++) {
      if (keys[i] > 0) found.push({ key: keys[i] - 1, weight: fixedPoint(weights[i]) });
    }
  } else {
    const codes = block("weights", sequence, layer, head);
    for (let key = 0; key < data.keys; key++) {
      const code = codes[query * data.keys + key];
      if (code > 0) found.push({ key, weight: fixedPoint(code) });
    }
  }
  return found.sort((a, b) => b.weight - a.weight || a.key - b.key);
}

// ---- the state, and its permalink
const state = {
  sequence: 0, layer: 0, head: 0, query: 0, key: 0, locked: false,
  lookedAt: false, // pointing at a key in the lines: show who looks at it
  scale: pooled ? "map" : "one", map: "mean",
};

const clamp = (value, length) => Math.max(0, Math.min(length - 1, value));

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (name, length, otherwise) =>
    /^\d{1,9}$/.test(given.get(name) || "") ? clamp(Number(given.get(name)), length) : otherwise;
  const choice = (name, choices, otherwise) =>
    choices.includes(given.get(name)) ? given.get(name) : otherwise;
  state.sequence = whole("s", data.tokens.length, state.sequence);
  state.layer = whole("l", data.layers.length, state.layer);
  state.head = whole("h", data.layers[state.layer].heads, clamp(state.head, data.layers[state.layer].heads));
  state.scale = choice("scale", ["one", "map", "row"], state.scale);
  state.map = choice("map", ["mean", "maximum"], state.map);
  state.locked = given.has("q");
  state.query = whole("q", data.queries, state.query);
  state.key = whole("k", data.keys, given.has("q") ? strongest(state.query) : state.key);
}

function writeHash() {
  const parts = { s: state.sequence, l: state.layer, h: state.head };
  if (state.locked) Object.assign(parts, { q: state.query, k: state.key });
  parts.scale = state.scale;
  if (pooled) parts.map = state.map;
  try {
    history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
  } catch {
    // a page embedded in a notebook has no address of its own
  }
}

const strongest = (query) => (looksAt(query)[0] || { key: state.key }).key;

// Changes are drawn once per frame; a change of focus leaves the map underneath as it is.
const FOCUS = 1, HEAD = 2, ALL = 3;
let pending = 0;
function changed(level) {
  if (!pending) requestAnimationFrame(redraw);
  pending = Math.max(pending, level);
}

function redraw() {
  const level = pending;
  pending = 0;
  if (level >= ALL) {
    readTheme();
    drawStrips();
    drawThumbs();
  }
  if (level >= HEAD) drawHead();
  drawOverlay();
  drawReadout();
  drawRow();
  shadeText();
  drawLines();
}

function focus(query, key, lookedAt = false) {
  if (query === state.query && key === state.key && lookedAt === state.lookedAt) return;
  Object.assign(state, { query, key, lookedAt });
  changed(FOCUS);
}

/** Pointing moves the focus until a click locks it. */
function hover(query, key, lookedAt) {
  if (!state.locked) focus(query, key, lookedAt);
}

function lock(query, key, lookedAt) {
  const again = state.locked && query === state.query && key === state.key;
  focus(query, key, lookedAt);
  setLock(!again);
}

function setLock(locked) {
  state.locked = locked;
  if (locked) reveal(strips.query[state.query]);
  writeHash();
  changed(FOCUS);
}

function selectHead(layer, head) {
  state.layer = clamp(layer, data.layers.length);
  state.head = clamp(head, data.layers[state.layer].heads);
  writeHash();
  changed(HEAD);
}

// ---- colour
// One hue from paper to ink, so that darker (in the dark theme: lighter) always means more weight.
const LIGHT = ["#ffffff", "#d9e6f5", "#a3c6e6", "#5f9fd1", "#2a71b2", "#0f4788", "#08264f"];
const DARK = ["#131823", "#1b3350", "#205584", "#2f7cb5", "#5ea5d6", "#a3cdec", "#eef6fd"];
const darkTheme = matchMedia("(prefers-color-scheme: dark)");
const theme = { ramp: [], colors: {} };

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "ink", "muted", "rule", "accent", "hidden", "hatch"]) {
    theme.colors[name] = style.getPropertyValue(`--${name}`).trim();
  }
  const stops = (darkTheme.matches ? DARK : LIGHT).map((stop) =>
    [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
  theme.ramp = Array.from({ length: 256 }, (_, level) => {
    const at = (level / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (at - low)));
  });
  const ramp = $("ramp").getContext("2d");
  theme.ramp.forEach((color, level) => {
    ramp.fillStyle = `rgb(${color})`;
    ramp.fillRect(level, 0, 1, 1);
  });
}

const levelOf = (weight, full) => (full > 0 ? Math.min(255, Math.round((weight / full) * 255)) : 0);
const colorOf = (weight, full) => theme.ramp[levelOf(weight, full)];
const luminance = ([red, green, blue]) => 0.3 * red + 0.59 * green + 0.11 * blue;
const inkOn = (color) => (luminance(color) > 140 ? "#10151d" : "#ffffff");

/** The weight drawn in full colour in each row of a map. */
function fullScale(codes, rows, columns) {
  if (state.scale === "one") return new Float64Array(rows).fill(1);
  const largest = new Uint16Array(rows);
  codes.forEach((code, i) => {
    const row = Math.floor(i / columns);
    if (code > largest[row]) largest[row] = code;
  });
  if (state.scale === "map") largest.fill(largest.reduce((a, b) => Math.max(a, b), 0));
  return Float64Array.from(largest, (code) => weightOf(code) || 0);
}

/** The weight drawn in full colour in what belongs to one query: ranking, text and lines. */
function fullOf(found) {
  if (state.scale === "one") return 1;
  const largest = found.length ? found[0].weight : 0;
  if (state.scale === "row" || pooled) return largest;
  return fullScale(codesOf(state.layer, state.head), cellRows, cellColumns)[state.query];
}

// ---- maps as pictures
/** At most `limit` rows and columns: each cell the largest weight it covers, so no line is lost. */
function shrink(codes, rows, columns, limit) {
  if (rows <= limit && columns <= limit) return { codes, rows, columns };
  const small = { rows: Math.min(rows, limit), columns: Math.min(columns, limit) };
  small.codes = new Uint16Array(small.rows * small.columns);
  for (let row = 0, i = 0; row < rows; row++) {
    const start = cellOf(row, small.rows, rows) * small.columns;
    for (let column = 0; column < columns; column++, i++) {
      const cell = start + Math.floor((column * small.columns) / columns);
      if (codes[i] > small.codes[cell]) small.codes[cell] = codes[i];
    }
  }
  return small;
}

/** Draw one pixel per cell; hidden cells stay transparent, so the hatching behind shows through. */
function paint(canvas, codes, limit) {
  const map = shrink(codes, cellRows, cellColumns, limit);
  const full = fullScale(map.codes, map.rows, map.columns);
  canvas.width = map.columns;
  canvas.height = map.rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(map.columns, map.rows);
  map.codes.forEach((code, i) => {
    if (code === 0) return;
    const color = colorOf(weightOf(code), full[Math.floor(i / map.columns)]);
    image.data.set(color, 4 * i);
    image.data[4 * i + 3] = 255;
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

const FONT = '12px system-ui, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif';

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Size a canvas in page pixels, sharp on any screen. */
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = FONT;
  context.textBaseline = "middle";
  return context;
}
