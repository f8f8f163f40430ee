// Curves over steps, as SVG.
'use strict';

const CHART = { width: 340, height: 170, left: 46, right: 8, top: 8, bottom: 20 };

/* How curves are drawn, by the query of `#run`: the mean of the last `smooth` values, and a logarithmic axis. */
const PLAIN = { smooth: 1, isLog: false };
const MAX_SMOOTH = 1000;

function readLook(text) {
  const query = new URLSearchParams(text);
  const smooth = Number(query.get('smooth'));
  return { smooth: Number.isInteger(smooth) && smooth > 1 ? Math.min(smooth, MAX_SMOOTH) : 1, isLog: query.get('log') === '1' };
}

function writeLook(look) {
  return new URLSearchParams([...(look.smooth > 1 ? [['smooth', look.smooth]] : []), ...(look.isLog ? [['log', 1]] : [])]).toString();
}

/* `series`: [{run, name, points: [[step, value or null], ...]}]. `pick(step)` is called for a click. What never moves is a line of text. */
function makeChart(title, series, pick, { code = '', look = PLAIN } = {}) {
  const known = series.flatMap((each) => each.points.filter(([, y]) => isNumber(y)));
  if (!known.length) return null;
  const name = [title, code ? el('code', {}, code) : null];
  if (isStill(series)) return el('p', { class: 'still' }, name, readoutOf(series, null));
  const refusal = look.isLog ? refuseLog(known.map(([, y]) => y)) : null;
  const isLog = look.isLog && refusal === null;
  const place = (points) => (isLog ? points.map(([x, y]) => [x, y > 0 ? y : null]) : points);
  const smoothed = series.map((each) => ({ ...each, points: smoothPoints(each.points, look.smooth) }));
  const bounds = findBounds([...known, ...smoothed.flatMap((each) => each.points)].filter(([, y]) => isNumber(y)), isLog);
  const drawn = (some, isFaint) => some.map((each) => makeCurve({ ...each, points: place(each.points) }, bounds, isFaint));
  const numZeros = isLog ? known.filter(([, y]) => y === 0).length : 0;
  const note = refusal ?? (numZeros ? `${numZeros} of ${plural(known.length, 'value')} are 0, and not shown` : null);
  const readout = el('div', { class: 'readout' });
  const marker = svg('line', { class: 'marker', y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: 'hidden' });
  const picture = svg('svg', { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: 'img', 'aria-label': title },
    makeAxes(bounds), look.smooth > 1 ? [drawn(series, true), drawn(smoothed, false)] : drawn(series, false), marker);
  const show = (step) => { readout.replaceChildren(); fill(readout, {}, [step === null ? el('span', { class: 'soft' }, 'last ') : el('span', { class: 'soft' }, `step ${format(step)} `), readoutOf(series, step), look.smooth > 1 ? el('span', { class: 'means' }, el('span', { class: 'soft' }, 'mean '), readoutOf(smoothed, step)) : null]); };
  const stepAt = (event) => {
    const box = picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * CHART.width;
    const wanted = bounds.x0 + ((x - CHART.left) / (CHART.width - CHART.left - CHART.right)) * (bounds.x1 - bounds.x0);
    return known.reduce((best, [step]) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), known[0][0]);
  };
  picture.addEventListener('pointermove', (event) => {
    const step = stepAt(event);
    const x = placeX(step, bounds);
    marker.setAttribute('x1', x); marker.setAttribute('x2', x); marker.setAttribute('visibility', 'visible');
    show(step);
  });
  picture.addEventListener('pointerleave', () => { marker.setAttribute('visibility', 'hidden'); show(null); });
  if (pick) picture.addEventListener('click', (event) => pick(stepAt(event)));
  show(null);
  return el('figure', { class: 'chart' }, el('figcaption', {}, name), picture, readout, note ? el('p', { class: 'soft note' }, note) : null);
}

/* Why values stay on a linear axis, or null: of a factor below 10 both axes show the same. */
function refuseLog(values) {
  if (values.some((y) => y < 0)) return 'linear: it has values below 0';
  const [low, high] = values.filter((y) => y > 0).reduce(([least, most], y) => [Math.min(least, y), Math.max(most, y)], [Infinity, 0]);
  return high < 10 * low ? 'linear: its values are within a factor of 10' : null;
}

/* Whether each run has one value, at all of several steps. */
function isStill(series) {
  const values = series.map((each) => each.points.map(([, y]) => y).filter(isNumber));
  return values.every((own) => new Set(own).size <= 1) && values.some((own) => own.length > 1);
}

/* Charts in a grid, and below them a line for each that never moved. */
function layCharts(nodes) {
  const [still, moving] = [true, false].map((isLine) => nodes.filter((node) => node && node.matches('.still') === isLine));
  return [moving.length ? el('div', { class: 'charts' }, moving) : null, still.length ? el('div', { class: 'stills' }, still) : null];
}

/* The mean of each value and those before it, `size` in all; a step without a number has none. */
function smoothPoints(points, size) {
  const last = [];
  return points.map(([x, y]) => {
    if (!isNumber(y)) return [x, null];
    last.push(y);
    if (last.length > size) last.shift();
    return [x, mean(last)];
  });
}

function findBounds(points, isLog = false) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const [x, y] of points) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
  if (isLog) return { x0, x1: x1 === x0 ? x0 + 1 : x1, ...findDecades(points.map(([, y]) => y).filter((y) => y > 0)), isLog };
  if (y0 >= 0 && y0 < 0.4 * y1) y0 = 0;
  const unit = roundUp((y1 - y0) / 4 || Math.abs(y1) / 4 || 0.25);
  y0 = Math.floor(y0 / unit + 1e-9) * unit;
  y1 = Math.max(Math.ceil(y1 / unit - 1e-9) * unit, y0 + unit);
  return { x0, x1: x1 === x0 ? x0 + 1 : x1, y0, y1, unit };
}

/* Of positive values the powers of ten, or 1, 2, 5 times such, around them, and which are named at an axis. */
function findDecades(values) {
  const size = (factor, power) => Number(`${factor}e${power}`);
  const [low, high] = values.reduce(([least, most], y) => [Math.min(least, y), Math.max(most, y)], [Infinity, -Infinity]);
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high) - 1e-9)];
  if (last - first > 2) {
    const each = Math.ceil((last - first) / 5);
    const powers = Array.from({ length: Math.ceil((last - first) / each) + 1 }, (_, n) => size(1, first + n * each));
    return { y0: powers[0], y1: powers.at(-1), ticks: powers };
  }
  const all = Array.from({ length: last - first + 2 }, (_, n) => [1, 2, 5].map((factor) => size(factor, first + n))).flat();
  const start = all.findLastIndex((tick) => tick <= low);
  const ticks = all.slice(start, Math.max(start + 2, all.findIndex((tick) => tick >= high) + 1));
  return { y0: ticks[0], y1: ticks.at(-1), ticks };
}

/* The next of 1, 2, 2.5, 5 times a power of ten. */
function roundUp(size) {
  const power = 10 ** Math.floor(Math.log10(size));
  return power * [1, 2, 2.5, 5, 10].find((each) => each * power >= size * (1 - 1e-9));
}

function placeX(x, { x0, x1 }) {
  return CHART.left + ((x - x0) / (x1 - x0)) * (CHART.width - CHART.left - CHART.right);
}

function placeY(y, { y0, y1, isLog }) {
  const share = isLog ? Math.log(y / y0) / Math.log(y1 / y0) : (y - y0) / (y1 - y0);
  return CHART.height - CHART.bottom - share * (CHART.height - CHART.top - CHART.bottom);
}

function makeAxes(bounds) {
  const values = bounds.ticks ?? Array.from({ length: Math.round((bounds.y1 - bounds.y0) / bounds.unit) + 1 }, (_, n) => bounds.y0 + n * bounds.unit);
  const parts = values.map((value) => {
    const y = placeY(value, bounds);
    return [svg('line', { class: 'rule', x1: CHART.left, x2: CHART.width - CHART.right, y1: y, y2: y }),
      svg('text', { x: CHART.left - 5, y: y + 3, 'text-anchor': 'end' }, format(Number(value.toPrecision(10)), 4))];
  });
  const ends = [[bounds.x0, 'start'], [bounds.x1, 'end']].map(([x, anchor]) =>
    svg('text', { x: placeX(x, bounds), y: CHART.height - 5, 'text-anchor': anchor }, format(x)));
  return svg('g', { class: 'axes' }, parts, ends);
}

function makeCurve({ run, points }, bounds, isFaint) {
  const pieces = [];
  let piece = [];
  for (const [x, y] of [...points, [0, null]]) {
    if (isNumber(y)) piece.push([placeX(x, bounds), placeY(y, bounds)]);
    else if (piece.length) { pieces.push(piece); piece = []; }
  }
  return svg('g', { class: `curve run${run}${isFaint ? ' raw' : ''}` }, pieces.map((each) => (each.length === 1
    ? svg('circle', { cx: each[0][0].toFixed(2), cy: each[0][1].toFixed(2), r: 2.5 })
    : svg('polyline', { points: each.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join(' ') }))));
}

/* The values at a step; for null the last value of each run. */
function readoutOf(series, step) {
  return series.map((each) => {
    const found = each.points.findLast(([x, y]) => isNumber(y) && (step === null || x === step));
    return el('span', { class: `value run${each.run}`, title: each.name }, found ? format(found[1]) : '–');
  });
}
