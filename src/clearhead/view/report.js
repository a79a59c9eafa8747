// ---- all heads
const thumbs = []; // thumbs[layer][head]: a button with its canvas

function buildHeads() {
  const most = Math.max(...data.layers.map((layer) => layer.heads));
  $("heads").style.setProperty("--columns", String(most));
  const top = element("div", "layer");
  top.append(element("span", "name"));
  const { numbers } = data.layers.find((layer) => layer.heads === most);
  top.append(...numbers.map((number) => element("span", "column", `H${number}`)));
  $("heads").append(top);
  data.layers.forEach((layer, index) => {
    const row = element("div", "layer");
    const name = element("span", "name", `L${layer.number}`);
    name.title = layer.name;
    row.append(name);
    thumbs.push(Array.from({ length: layer.heads }, (_, head) => {
      const button = element("button", "thumb");
      button.type = "button";
      button.setAttribute("aria-label", nameOf(index, head));
      button.append(element("canvas"));
      button.addEventListener("click", () => selectHead(index, head));
      row.append(button);
      return button;
    }));
    $("heads").append(row);
  });
}

let round = 0;
/** Draw the thumbnails in slices of 12 ms, so that a page with hundreds of heads answers at once. */
function drawThumbs() {
  const mine = ++round;
  const waiting = thumbs.flatMap((row, layer) => row.map((button, head) => ({ button, layer, head })));
  const slice = () => {
    const until = performance.now() + 12;
    while (mine === round && waiting.length && performance.now() < until) {
      const { button, layer, head } = waiting.shift();
      paint(button.firstChild, codesOf(layer, head), 64);
      button.title = [nameOf(layer, head), data.layers[layer].name, entropyText(layer, head)].join("\n").trim();
    }
    if (mine === round && waiting.length) setTimeout(slice);
  };
  slice();
}

function entropyText(layer, head) {
  const mean = data.layers[layer].meanEntropy;
  return mean ? `mean entropy ${mean[state.sequence][head].toFixed(2)} nats` : "";
}

// ---- the selected head
const SMALLEST_LABEL = 12; // pixels between two labels of an axis
let layout = null;

const cut = (label, most) => {
  const letters = Array.from(label);
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : label;
};

function axisLabel(tokens, start) {
  return pooled ? `${start} ${cut(tokens[start], 10)}` : cut(tokens[start], 14);
}
const rowLabel = (row) => axisLabel(queryTokens(), queryAt(row));
const columnLabel = (column) => axisLabel(keyTokens(), keyAt(column));

function range(length, step) {
  return Array.from({ length: Math.ceil(length / step) }, (_, i) => i * step);
}

/** Choose cell sizes and margins so that the map fills the room there is, and labels never overlap. */
function plan() {
  const room = Math.max(260, $("stage").clientWidth);
  const context = $("base").getContext("2d");
  context.font = FONT;
  const widest = (labels) => Math.max(...labels.map((label) => context.measureText(label).width));
  const left = 20 + Math.max(44, widest(range(cellRows, Math.ceil(cellRows / 60)).map(rowLabel)));
  const long = widest(range(cellColumns, Math.ceil(cellColumns / 60)).map(columnLabel));
  const slanted = (room - left) / cellColumns > 17;
  const right = slanted ? Math.min(80, long * 0.64) : 8;
  const top = Math.max(44, 14 + (slanted ? long * 0.77 : long));
  let width = Math.min(46, (room - left - right) / cellColumns);
  let height = Math.min(46, Math.max(640, window.innerHeight - 340) / cellRows);
  if (cellRows === cellColumns) width = height = Math.min(width, height);
  return {
    left, top, slanted, width, height,
    right: left + width * cellColumns,
    bottom: top + height * cellRows,
    total: Math.max(left + width * cellColumns + right, 0),
    rowStep: Math.ceil(SMALLEST_LABEL / height),
    columnStep: Math.ceil(SMALLEST_LABEL / width),
  };
}

function drawHead() {
  thumbs.forEach((row, layer) => row.forEach((button, head) => {
    const chosen = layer === state.layer && head === state.head;
    button.setAttribute("aria-pressed", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }));
  $("head-title").textContent = nameOf(state.layer, state.head);
  $("head-name").textContent = data.layers[state.layer].name;
  $("head-entropy").textContent = entropyText(state.layer, state.head);
  layout = plan();
  const context = sized($("base"), layout.total, layout.bottom + 2);
  sized($("overlay"), layout.total, layout.bottom + 2);
  const { left, top, right, bottom, width, height } = layout;
  context.fillStyle = hatching(context);
  context.fillRect(left, top, right - left, bottom - top);
  const codes = codesOf(state.layer, state.head);
  context.imageSmoothingEnabled = false;
  const limit = Math.ceil(Math.max(right - left, bottom - top) * (window.devicePixelRatio || 1));
  context.drawImage(paint(element("canvas"), codes, limit), left, top, right - left, bottom - top);
  drawGrid(context);
  if (width >= 34 && height >= 26) drawNumbers(context, codes);
  drawCorner(context);
  range(cellRows, layout.rowStep).forEach((row) => drawRowLabel(context, row));
  range(cellColumns, layout.columnStep).forEach((column) => drawColumnLabel(context, column));
  const peak = codes.reduce((a, b) => Math.max(a, b), 0);
  $("ramp-end").textContent = { one: "1", map: short(weightOf(peak) || 0), row: "largest of its row" }[state.scale];
}

/** Say which way to read the map, in the corner between its two axes. */
function drawCorner(context) {
  context.fillStyle = theme.colors.muted;
  context.textAlign = "right";
  context.font = `italic ${FONT}`;
  context.fillText("to →", layout.left - 7, layout.top - 32);
  context.fillText("from ↓", layout.left - 7, layout.top - 17);
  context.font = FONT;
}

function hatching(context) {
  const tile = element("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = theme.colors.hidden;
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = theme.colors.hatch;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift - 1, 7);
    pen.lineTo(shift + 7, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function drawGrid(context) {
  const { left, top, right, bottom, width, height } = layout;
  context.strokeStyle = theme.colors.rule;
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top - 0.5, right - left + 1, bottom - top + 1);
  if (Math.min(width, height) < 12) return;
  context.globalAlpha = 0.7;
  context.beginPath();
  for (let row = 1; row < cellRows; row++) {
    context.moveTo(left, Math.round(top + row * height) + 0.5);
    context.lineTo(right, Math.round(top + row * height) + 0.5);
  }
  for (let column = 1; column < cellColumns; column++) {
    context.moveTo(Math.round(left + column * width) + 0.5, top);
    context.lineTo(Math.round(left + column * width) + 0.5, bottom);
  }
  context.stroke();
  context.globalAlpha = 1;
}

function drawNumbers(context, codes) {
  const full = fullScale(codes, cellRows, cellColumns);
  context.save();
  context.font = FONT.replace("12px", "11px");
  context.textAlign = "center";
  codes.forEach((code, i) => {
    const weight = weightOf(code);
    if (!(weight >= 0.005)) return;
    const row = Math.floor(i / cellColumns);
    context.fillStyle = inkOn(colorOf(weight, full[row]));
    context.fillText(weight.toFixed(2), layout.left + ((i % cellColumns) + 0.5) * layout.width,
      layout.top + (row + 0.5) * layout.height);
  });
  context.restore();
}

function drawRowLabel(context, row) {
  context.textAlign = "right";
  context.fillText(rowLabel(row), layout.left - 7, layout.top + (row + 0.5) * layout.height);
}

function drawColumnLabel(context, column, background) {
  context.save();
  context.beginPath();
  context.rect(0, 0, layout.total, layout.top - 1); // a slanted label's background stays off the map
  context.clip();
  context.translate(layout.left + (column + 0.5) * layout.width, layout.top - 6);
  context.rotate(layout.slanted ? -0.88 : -Math.PI / 2);
  context.textAlign = "left";
  const label = columnLabel(column);
  if (background) {
    const ink = context.fillStyle;
    context.fillStyle = background;
    context.fillRect(-3, -8, context.measureText(label).width + 6, 16);
    context.fillStyle = ink;
  }
  context.fillText(label, 0, 0);
  context.restore();
}

/** The crosshair has a canvas of its own, so that pointing never redraws the map. */
function drawOverlay() {
  const canvas = $("overlay");
  const context = canvas.getContext("2d");
  const { left, top, right, bottom, width, height } = layout;
  context.clearRect(0, 0, layout.total, bottom + 2);
  const y = top + rowOf(state.query) * height;
  const x = left + columnOf(state.key) * width;
  context.strokeStyle = theme.colors.accent;
  context.lineWidth = 1;
  context.globalAlpha = 0.75;
  const around = (...box) => context.strokeRect(box[0] - 0.5, box[1] - 0.5, box[2] + 1, box[3] + 1);
  around(left, y, right - left, height);
  around(x, top, width, bottom - top);
  context.globalAlpha = 1;
  context.lineWidth = state.locked ? 3 : 2;
  around(x - 0.5, y - 0.5, width + 1, height + 1);
  context.font = `600 ${FONT}`;
  context.fillStyle = theme.colors.card;
  context.fillRect(0, y + height / 2 - 8, left - 2, 16);
  context.fillStyle = theme.colors.accent;
  drawRowLabel(context, rowOf(state.query));
  drawColumnLabel(context, columnOf(state.key), theme.colors.card);
}

// ---- the words around the map
/** Four decimals; a pooled mean may be far smaller and then shows its leading digits. */
function short(weight) {
  return pooled && weight > 0 && weight < 0.001 ? weight.toExponential(2) : weight.toFixed(4);
}

function named(tokens, first, last = first) {
  const made = element("span");
  const token = (index) => element("bdi", "token", cut(tokens[index], 60));
  made.append(last > first ? `${first}–${last} ` : `${first} `, token(first));
  if (last > first) made.append(" … ", token(last));
  return made;
}

function drawReadout() {
  const row = rowOf(state.query), column = columnOf(state.key);
  const index = row * cellColumns + column;
  const parts = ["from ", named(queryTokens(), queryAt(row), lastOf(row, cellRows, data.queries)), " to ",
    named(keyTokens(), keyAt(column), lastOf(column, cellColumns, data.keys)), ": "];
  const code = codesOf(state.layer, state.head)[index];
  if (code === 0) parts.push(element("b", "", "hidden by the mask"));
  else if (!pooled) parts.push(element("b", "", short(weightOf(code))));
  else {
    const value = (kind) => short(weightOf(block(kind, state.sequence, state.layer, state.head)[index]));
    parts.push("mean ", element("b", "", value("mean")), ", maximum ", element("b", "", value("maximum")));
  }
  if (state.locked) parts.push(element("span", "lock", "locked · Esc releases"));
  $("readout").replaceChildren(...parts);
}

function drawRow() {
  const found = looksAt(state.query);
  const shown = found.slice(0, pooled ? data.top : 8);
  const full = fullOf(found);
  if (document.activeElement !== $("query")) $("query").value = String(state.query);
  $("query-token").textContent = queryTokens()[state.query];
  const entropy = data.layers[state.layer].entropy && found.length
    ? block("entropy", state.sequence, state.layer, state.head, Float32Array)[state.query] : null;
  $("row-entropy").textContent = entropy === null ? "" : `entropy ${entropy.toFixed(2)} nats`;
  $("ranking").replaceChildren(...shown.map(({ key, weight }) => {
    const line = element("li", key === state.key ? "to" : "");
    const track = element("span", "track");
    const fill = element("div", "fill");
    fill.style.width = `${full > 0 ? Math.min(100, (100 * weight) / full) : 0}%`;
    fill.style.background = `rgb(${theme.ramp[160]})`;
    track.append(fill);
    line.append(element("span", "index", String(key)), element("bdi", "", keyTokens()[key]), track,
      element("span", "number", weight.toFixed(4)));
    line.addEventListener("click", () => lock(state.query, key));
    return line;
  }));
  const rest = Math.max(0, 1 - shown.reduce((sum, { weight }) => sum + weight, 0));
  const others = pooled ? "All other visible keys" : `The other ${found.length - shown.length} visible keys`;
  $("rest").textContent = !found.length ? "The mask hides every key from this query."
    : pooled || found.length > shown.length ? `${others} together: ${rest.toFixed(4)}` : "";
}

// ---- the text
const strips = { query: [], key: [] };
let shaded = [];

function fillStrip(strip, tokens, caption) {
  strip.replaceChildren(...(caption ? [element("bdi", "caption", caption)] : []));
  return tokens.map((token, index) => {
    // a special token such as [CLS] is isolated, so that the text itself decides its direction
    const tag = /^[[<].*[\]>]$/.test(token) ? "bdi" : "span";
    const piece = element(tag, token === "[PAD]" ? "piece pad" : "piece", token || " ");
    piece.dataset.index = String(index);
    strip.append(piece, " ");
    return piece;
  });
}

function drawStrips() {
  const both = data.keyTokens !== null;
  strips.query = fillStrip($("query-strip"), queryTokens(), both ? "from" : "");
  strips.key = both ? fillStrip($("key-strip"), keyTokens(), "to") : strips.query;
  $("key-strip").hidden = !both;
  shaded = [];
  $("text-hint").textContent = "Point at a token: the text is shaded by the weight that token gives"
    + (pooled ? ` to its ${data.top} strongest keys.` : ".") + " Click to lock.";
}

/** Scroll a strip, never the page, to one of its tokens. */
function reveal(piece) {
  const strip = piece.parentElement.getBoundingClientRect(), box = piece.getBoundingClientRect();
  if (box.top < strip.top || box.bottom > strip.bottom) {
    piece.parentElement.scrollTop += box.top - strip.top - strip.height / 3;
  }
}

function shadeText() {
  for (const piece of shaded) {
    piece.style.background = piece.style.color = "";
    piece.classList.remove("from");
    piece.title = "";
  }
  const found = looksAt(state.query);
  const full = fullOf(found);
  shaded = found.map(({ key, weight }) => {
    const color = colorOf(weight, full);
    const piece = strips.key[key];
    piece.style.background = `rgb(${color})`;
    piece.style.color = inkOn(color);
    piece.title = `${key}: ${weight.toFixed(4)}`;
    return piece;
  });
  strips.query[state.query].classList.add("from");
  shaded.push(strips.query[state.query]);
}

// ---- lines from token to token
const linesFit = !pooled && Math.max(data.queries, data.keys) <= 64;
const lineHeight = Math.max(data.queries, data.keys) > 32 ? 15 : 19;
const lineY = (index) => (index + 0.5) * lineHeight;

function drawLines() {
  if (!linesFit) return;
  const canvas = $("lines");
  const width = Math.min(420, canvas.parentElement.clientWidth - 32);
  const context = sized(canvas, width, Math.max(data.queries, data.keys) * lineHeight);
  const codes = codesOf(state.layer, state.head);
  const full = fullScale(codes, cellRows, cellColumns);
  const [from, to] = [width * 0.34, width * 0.66];
  codes.forEach((code, i) => {
    const query = Math.floor(i / data.keys), key = i % data.keys;
    const strength = full[query] > 0 ? weightOf(code) / full[query] : 0;
    if (!(strength > 0.01)) return;
    const chosen = state.lookedAt ? key === state.key : query === state.query;
    context.strokeStyle = chosen ? theme.colors.accent : `rgb(${theme.ramp[170]})`;
    context.globalAlpha = Math.min(1, strength) * (chosen ? 1 : 0.3);
    context.lineWidth = chosen ? 2 : 1;
    context.beginPath();
    context.moveTo(from + 4, lineY(query));
    context.lineTo(to - 4, lineY(key));
    context.stroke();
  });
  context.globalAlpha = 1;
  const column = (tokens, x, align, marked) => tokens.forEach((token, index) => {
    context.textAlign = align;
    context.fillStyle = index === marked ? theme.colors.accent : theme.colors.ink;
    context.font = index === marked ? `600 ${FONT}` : FONT;
    context.fillText(cut(token, 13), x, lineY(index), width * 0.33);
  });
  column(queryTokens(), from, "right", state.lookedAt ? -1 : state.query);
  column(keyTokens(), to, "left", state.lookedAt ? state.key : -1);
}

// ---- pointing, clicking, keys
function mapCell(event) {
  const column = Math.floor((event.offsetX - layout.left) / layout.width);
  const row = Math.floor((event.offsetY - layout.top) / layout.height);
  const inside = row >= 0 && row < cellRows && column >= 0 && column < cellColumns;
  if (!inside) return null;
  // inside the same cell of a pooled map the chosen token stays
  return [rowOf(state.query) === row ? state.query : queryAt(row),
    columnOf(state.key) === column ? state.key : keyAt(column)];
}

function listenToMap() {
  const map = $("overlay");
  map.addEventListener("mousemove", (event) => {
    const cell = mapCell(event);
    if (cell) hover(...cell);
  });
  map.addEventListener("click", (event) => {
    const cell = mapCell(event);
    if (cell) lock(...cell);
  });
  map.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (event.key === "Enter" || event.key === " ") setLock(!state.locked);
    else if (step) {
      focus(queryAt(clamp(rowOf(state.query) + step[0], cellRows)),
        keyAt(clamp(columnOf(state.key) + step[1], cellColumns)));
      if (state.locked) writeHash();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

function listenToText() {
  const query = (event) => {
    const piece = event.target.closest(".piece");
    return piece ? Number(piece.dataset.index) : null;
  };
  $("query-strip").addEventListener("mouseover", (event) => {
    const at = query(event);
    if (at !== null) hover(at, strongest(at));
  });
  $("query-strip").addEventListener("click", (event) => {
    const at = query(event);
    if (at !== null) lock(at, strongest(at));
  });
  $("query").addEventListener("input", (event) => {
    const at = event.target.valueAsNumber;
    if (Number.isInteger(at) && at >= 0 && at < data.queries) {
      focus(at, strongest(at));
      setLock(true);
    }
  });
}

function listenToLines() {
  const at = (event) => {
    const index = Math.floor(event.offsetY / lineHeight);
    const right = event.offsetX > $("lines").clientWidth / 2;
    if (index >= (right ? data.keys : data.queries)) return null;
    return right ? [state.query, index, true] : [index, strongest(index), false];
  };
  $("lines").addEventListener("mousemove", (event) => {
    const found = at(event);
    if (found) hover(...found);
  });
  $("lines").addEventListener("click", (event) => {
    const found = at(event);
    if (found) lock(...found);
  });
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function listenToPage() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return setLock(false);
    const step = ARROWS[event.key];
    const here = document.activeElement === document.body || $("heads").contains(document.activeElement);
    if (!step || !here || event.ctrlKey || event.altKey || event.metaKey) return undefined;
    selectHead(state.layer + step[0], state.head + step[1]);
    thumbs[state.layer][state.head].focus();
    event.preventDefault();
    return undefined;
  });
  for (const name of ["scale", "map"]) {
    $(name).addEventListener("change", (event) => {
      state[name] = event.target.value;
      writeHash();
      changed(ALL);
    });
  }
  $("sequence").addEventListener("change", (event) => {
    state.sequence = Number(event.target.value);
    writeHash();
    changed(ALL);
  });
  window.addEventListener("hashchange", () => {
    readHash();
    showChoices();
    changed(ALL);
  });
  window.addEventListener("resize", () => changed(HEAD));
  darkTheme.addEventListener("change", () => changed(ALL));
}

// ---- start
function showChoices() {
  $("scale").value = state.scale;
  $("map").value = state.map;
  $("sequence").value = String(state.sequence);
}

function buildHeader() {
  $("mode").textContent = data.line;
  $("notes").append(...data.notes.map((note) => element("li", "", note)));
  $("sequence").append(...data.tokens.map((tokens, index) => {
    const text = tokens.filter((token) => token !== "[PAD]").join(" ");
    const option = element("option", "", `${index + 1}: ${cut(text, 90)}`);
    option.value = String(index);
    return option;
  }));
  $("picker").hidden = data.tokens.length < 2;
  $("cell-choice").hidden = !pooled;
  $("edges").hidden = !linesFit;
  document.body.classList.toggle("pooled", pooled);
  document.querySelector("main").classList.toggle("no-edges", !linesFit);
  $("query").max = String(data.queries - 1);
}

/** For scripts and tests: a weight as the page shows it, null where hidden, undefined where not kept. */
function weight(sequence, layer, head, query, key) {
  if (!(query >= 0 && query < data.queries && key >= 0 && key < data.keys)) return undefined;
  if (pooled) return (looksAt(query, layer, head, sequence).find((seen) => seen.key === key) || {}).weight;
  const code = block("weights", sequence, layer, head)[query * data.keys + key];
  return code === 0 ? null : fixedPoint(code);
}
window.clearheadReport = Object.freeze({ weight });

buildHeader();
buildHeads();
readHash();
if (!state.locked) state.key = strongest(state.query);
showChoices();
listenToMap();
listenToText();
listenToLines();
listenToPage();
pending = ALL;
redraw();
if (state.locked) reveal(strips.query[state.query]);
