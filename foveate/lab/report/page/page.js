"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function make(name, text, more = {}) {
  const one = Object.assign(document.createElement(name), more);
  if (text !== undefined) one.textContent = text;
  return one;
}

// A spec that may be broken into lines after its marks
function fill(one, spec) {
  one.replaceChildren(...spec.split(/(?<=[,:=])/).flatMap((part) => [part, make("wbr")]));
  return one;
}

function choices(select, names, chosen = 0) {
  select.replaceChildren(...names.map((name, place) => new Option(name, place, false, place === chosen)));
  select.closest("label").hidden = names.length < 2;
}

// On a dark page a dark colour is mixed with white
function tone(hex) {
  const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
  return `rgb(${parts.map((part) => (dark.matches ? Math.round(part + (255 - part) * 0.45) : part)).join(" ")})`.replaceAll(" ", ",");
}

// Frontier

const AMOUNTS = {
  keys_read_share: { words: "keys read in decode", scale: 100, suffix: " %" },
  kv_bytes_per_step: { words: "bytes of keys and values read in a decode step, a sequence", scale: 1e-6, suffix: " MB" },
};

const COLORS = ["#0072b2", "#d55e00", "#009e73", "#aa3377", "#7a5c00", "#4a4a9c", "#cc6699"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star"];
const GLYPHS = ["●", "■", "◆", "▲", "▼", "✚", "✖", "★"];

// Ticks of a logarithmic axis, as many as are legible
function ticks(values) {
  const [least, most] = [Math.min(...values) / 1.25, Math.max(...values) * 1.25];
  const powers = Array.from({ length: 14 }, (_, place) => 10 ** (place - 5));
  const inside = (firsts) => powers.flatMap((power) => firsts.map((first) => first * power)).filter((tick) => tick >= least && tick <= most);
  const room = at("chart").clientWidth / 75;
  const finer = [[1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8], [1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]].map(inside);
  return finer.find((some) => some.length <= room) ?? finer.at(-1);
}

// Where points stand on the axis: those that would cover each other stand side by side, ten pixels apart
function apart(points, exact, values) {
  const step = (1.5625 * (Math.max(...values) / Math.min(...values))) ** (10 / Math.max(200, at("chart").clientWidth - 60));
  const sorted = [...points].sort((one, other) => exact(one) - exact(other));
  const groups = [];
  sorted.forEach((point, place) => {
    if (place && exact(point) < exact(sorted[place - 1]) * step) groups.at(-1).push(point);
    else groups.push([point]);
  });
  const places = new Map();
  for (const some of groups) {
    const middle = Math.sqrt(exact(some[0]) * exact(some.at(-1)));
    some.forEach((point, place) => places.set(point, some.length < 2 ? exact(point) : middle * step ** (place - (some.length - 1) / 2)));
  }
  return (point) => places.get(point) ?? exact(point);
}

function drawFrontier() {
  at("lines").querySelectorAll(".mark").forEach((mark, place) => { mark.style.color = tone(COLORS[place % COLORS.length]); });
  const panel = data.frontier[at("panel").value];
  const amount = AMOUNTS[at("against").value];
  const exact = (point) => amount.scale * point[at("against").value];
  const shown = [...at("lines").querySelectorAll("input")].map((box) => box.checked);
  const values = panel.lines.flatMap((line) => line.points.map(exact));
  const x = apart(panel.lines.filter((_, place) => shown[place]).flatMap((line) => line.points), exact, values);
  const marks = ticks(values);
  const traces = panel.lines.map((line, place) => ({
    visible: shown[place],
    x: line.points.map(x),
    y: line.points.map((point) => point.score),
    error_y: {
      type: "data", symmetric: false, thickness: 1.2, width: 0,
      array: line.points.map((point) => point.high - point.score),
      arrayminus: line.points.map((point) => point.score - point.low),
    },
    text: line.points.map((point) => point.spec.replaceAll(",", ",<br>")),
    hovertemplate: `%{text}<br>%{y:.1f} [%{customdata[0]:.1f}, %{customdata[1]:.1f}], n = %{customdata[2]}<br>%{customdata[3]:.3~g}${amount.suffix}<extra></extra>`,
    customdata: line.points.map((point) => [point.low, point.high, point.n, exact(point)]),
    mode: "lines+markers",
    line: { color: tone(COLORS[place % COLORS.length]), width: 1.6 },
    marker: { symbol: SYMBOLS[place % SYMBOLS.length], size: 8 },
  }));
  const level = { type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.dense_score, y1: panel.dense_score, line: { color: color("ink"), width: 1.4 }, layer: "below" };
  const band = panel.dense && { type: "rect", xref: "paper", x0: 0, x1: 1, y0: panel.dense[0], y1: panel.dense[1], fillcolor: color("ink"), opacity: 0.08, line: { width: 0 }, layer: "below" };
  const axis = { color: color("ink"), gridcolor: color("rule"), zeroline: false, automargin: true };
  Plotly.react("chart", traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("ink"), family: "system-ui, sans-serif" },
    margin: { l: 48, r: 12, t: 12, b: 48 }, showlegend: false, hovermode: "closest",
    hoverlabel: { bgcolor: color("panel"), font: { color: color("ink") }, align: "left" },
    xaxis: { ...axis, type: "log", tickangle: 0, range: [Math.min(...values) / 1.25, Math.max(...values) * 1.25].map(Math.log10), tickvals: marks, ticktext: marks.map((tick) => `${+tick.toPrecision(3)}${amount.suffix}`), title: { text: amount.words, font: { size: 13 } } },
    yaxis: { ...axis, title: { text: `score (${panel.metric})`, font: { size: 13 } } },
    shapes: band ? [band, level] : [level],
    annotations: [{ xref: "paper", x: 0, y: panel.dense_score, xanchor: "left", yanchor: "bottom", showarrow: false, text: `dense ${panel.dense_score.toFixed(1)}`, font: { color: color("ink"), size: 12 } }],
  }, { responsive: true, displayModeBar: false });
  at("chart").setAttribute("aria-label", `Score against ${amount.words}: ${panel.title}. The tables below have the numbers.`);
}

function choosePanel() {
  const panel = data.frontier[at("panel").value];
  const boxes = panel.lines.map((line, place) => {
    const label = make("label");
    const mark = make("span", GLYPHS[place % GLYPHS.length], { className: "mark" });
    mark.setAttribute("aria-hidden", "true");
    label.append(make("input", undefined, { type: "checkbox", checked: place < data.most, onchange: drawFrontier }), mark, fill(make("span"), line.name));
    return label;
  });
  at("lines").replaceChildren(make("legend", panel.lines.length > data.most ? `Lines (${data.most} of ${panel.lines.length} at first, those with the best trade-offs before others)` : "Lines"), ...boxes);
  at("verdict").textContent = panel.verdict.words;
  drawWithin(panel.verdict.within);
  at("chart-facts").textContent = `${panel.title}. Bars and the band are 95 % intervals; the level is dense attention. ${panel.commits}`;
  drawFrontier();
}

function drawWithin(methods) {
  at("within").hidden = methods.length < 2;
  const table = make("table"), head = make("tr");
  head.append(...["method", "Δ to dense [95 %]", "keys read", "shown within a point"].map((name) => make("th", name, { scope: "col" })));
  table.append(head, ...methods.map(([spec, points, share, shown]) => {
    const line = make("tr"), name = make("td");
    name.append(fill(make("code"), spec));
    line.append(name, ...[points, share, shown].map((text) => make("td", text)));
    return line;
  }));
  at("within").querySelector("div").replaceChildren(table);
}

// Needles

function drawNeedles() {
  const of = data.needles[at("needles-of").value];
  const maps = Object.entries(of.maps).map(([method, map]) => {
    const table = make("table");
    table.append(fill(make("caption"), method));
    const head = make("tr");
    head.append(make("th", "depth"), ...of.lengths.map((length) => make("th", length, { scope: "col" })));
    table.append(head, ...of.depths.map((depth, row) => {
      const line = make("tr");
      line.append(make("th", depth, { scope: "row" }), ...map[row].map((cell) => {
        const box = make("td", cell ? cell[0].toFixed(0) : "–", { title: cell ? `${cell[1]} needles` : "not measured" });
        if (cell) box.style.background = `color-mix(in srgb, var(--read) ${cell[0]}%, var(--reused))`;
        return box;
      }));
      return line;
    }));
    const wide = make("div", undefined, { className: "wide", tabIndex: 0 });
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", `Needles found by ${method}`);
    wide.append(table);
    return wide;
  });
  at("needles-facts").textContent = `${of.title}. Percent found, by prompt tokens (across) and depth; depth 0 is the beginning of the text.`;
  const more = maps.splice(data.most);
  at("needles-maps").replaceChildren(...maps);
  at("needles-more").hidden = !more.length;
  at("needles-more").querySelector("summary").textContent = `${more.length} more methods`;
  at("needles-more").querySelector("div").replaceChildren(...more);
}

// Decode steps

function drawSteps() {
  const of = data.steps[at("steps-of").value];
  const most = Math.max(...of.bars.map((bar) => bar.total));
  at("steps-facts").textContent = of.facts;
  const names = [...new Set(of.bars.flatMap((bar) => bar.parts.map((part) => part[0])))];
  at("steps-key").replaceChildren(...names.map((name) => {
    const entry = make("li", of.words[name]);
    const swatch = make("span", "", { className: "swatch" });
    swatch.style.background = of.colors[name];
    entry.prepend(swatch);
    return entry;
  }));
  at("bars").replaceChildren(...of.bars.map((bar) => {
    const entry = make("li", `${bar.method}: ${+bar.total.toPrecision(3)} ${of.unit}`);
    const line = make("div", undefined, { className: "bar" });
    line.setAttribute("role", "img");
    line.setAttribute("aria-label", bar.parts.map((part) => `${of.words[part[0]]} ${+part[1].toPrecision(3)}`).join(", "));
    for (const [name, value] of bar.parts) {
      const part = make("span", undefined, { title: `${of.words[name]}: ${+value.toPrecision(3)} ${of.unit}` });
      part.style.cssText = `width: ${(100 * value) / most}%; background: ${of.colors[name]}`;
      line.append(part);
    }
    entry.append(line);
    return entry;
  }));
}

// Lens

// A method whose files are named without their folders
const named = (method) => method.replace(/"[^"]*\/([^"/]+)"/g, '"$1"');

const lettersOf = (runs) => runs.replace(/([a-z])(\d+)/g, (_, letter, number) => letter.repeat(number));

// The layer shown first: of those that are recorded the one in the middle
function middle(layers) {
  const recorded = layers.flatMap((one, place) => (one.unchanged ? [] : [place]));
  return recorded[recorded.length >> 1];
}

function chooseLens() {
  const lens = data.lenses[at("lens-of").value];
  choices(at("lens-step"), lens.steps.map((_, step) => `${step + 1}: ${JSON.stringify(lens.tokens[lens.prompt_tokens + step])}`));
  choices(at("lens-layer"), lens.layers.map((one) => `${one.layer}${one.unchanged ? " (unchanged)" : ""}`), middle(lens.layers));
  at("lens-text").replaceChildren(...lens.tokens.map((token, place) => make("span", token.replaceAll("\n", "↵\n"), { title: `token ${place}` })));
  chooseLayer();
}

function chooseLayer() {
  const lens = data.lenses[at("lens-of").value];
  const heads = lens.steps[0][at("lens-layer").value];
  choices(at("lens-head"), heads.map((_, head) => `${head}`), Math.min(at("lens-head").value || 0, Math.max(0, heads.length - 1)));
  drawLens();
}

function drawLens() {
  const lens = data.lenses[at("lens-of").value];
  const [step, layer, head] = ["lens-step", "lens-layer", "lens-head"].map((id) => Number(at(id).value));
  const of = (place) => lettersOf(lens.patterns[lens.steps[step][place][Math.min(head, lens.steps[step][place].length - 1)]] ?? "");
  const letters = of(layer);
  const one = lens.layers[layer];
  const number = lens.prompt_tokens + step + 1;
  [...at("lens-text").children].forEach((span, place) => {
    span.hidden = place >= number;
    span.className = `${letters[place] ?? "n"}${place === number - 1 ? " self" : ""}`;
  });
  const text = at("lens-text"), self = text.querySelector(".self");
  if (self) text.scrollTop = self.offsetTop - text.offsetTop - text.clientHeight / 2;
  const from = one.reads_choice_of == null ? "" : ` It reads what layer ${one.reads_choice_of} has chosen.`;
  const own = one.unchanged ? `: unchanged, ${one.unchanged}; nothing is recorded` : one.method === lens.method ? "" : `: ${named(one.method)}`;
  const share = lens.recall[step][layer][head];
  const held = share === undefined ? "" : ` What this head reads holds ${(100 * share).toFixed(1)} % of the exact attention.`;
  at("lens-facts").textContent = `${lens.model}, ${lens.dtype}, ${named(lens.method)}. Layer ${one.layer}${own}.${from} ${held} The outlined token is the one that reads.`;
  const known = Object.entries(data.states).filter(([letter]) => lens.patterns.some((runs) => runs.includes(letter)));
  at("lens-key").replaceChildren(...known.map(([letter, words]) => {
    const entry = make("li", `${words}: ${[...letters].filter((other) => other === letter).length}`);
    entry.prepend(make("span", "", { className: `swatch ${letter}` }));
    return entry;
  }));
  const map = at("lens-map");
  const high = Math.max(2, Math.min(10, Math.floor(300 / lens.layers.length)));
  [map.width, map.height] = [number, lens.layers.length * high];
  map.style.height = `${map.height}px`;
  const pen = map.getContext("2d");
  const colors = { r: color("map-read"), u: color("map-reused"), s: color("map-summary"), n: color("panel"), e: color("map-evicted") };
  lens.layers.forEach((_, place) => {
    [...of(place)].forEach((letter, token) => {
      pen.fillStyle = colors[letter];
      pen.fillRect(token, place * high, 1, high - (high > 3 ? 1 : 0));
    });
  });
  pen.fillStyle = color("accent");
  pen.fillRect(0, layer * high, number, 1);
  pen.fillRect(0, (layer + 1) * high - 1, number, 1);
}

// Begin

function begin(section, select, draw, titles) {
  if (!titles.length) return;
  at(section).hidden = false;
  choices(at(select), titles);
  at(select).onchange = draw;
  draw();
}

begin("frontier", "panel", choosePanel, data.frontier.map((one) => one.title));
at("against").onchange = drawFrontier;
begin("needles", "needles-of", drawNeedles, data.needles.map((one) => one.title));
begin("steps", "steps-of", drawSteps, data.steps.map((one) => one.title));
begin("lens", "lens-of", chooseLens, data.lenses.map((one) => `${named(one.method)}, ${one.model}`));
at("lens-step").onchange = drawLens;
at("lens-layer").onchange = chooseLayer;
at("lens-head").onchange = drawLens;
at("lens-map").onclick = (event) => {
  const layers = data.lenses[at("lens-of").value].layers.length;
  at("lens-layer").value = Math.min(layers - 1, Math.floor((event.offsetY / at("lens-map").clientHeight) * layers));
  chooseLayer();
};
at("tables").hidden = !at("tables").querySelector("details");
addEventListener("resize", () => data.frontier.length && drawFrontier());
dark.addEventListener("change", () => {
  if (data.frontier.length) drawFrontier();
  if (data.lenses.length) drawLens();
});
