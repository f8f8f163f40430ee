// Curves over steps, as SVG.
'use strict';

const CHART = { width: 340, height: 170, left: 46, right: 8, top: 8, bottom: 20 };

/* `series`: [{run, name, points: [[step, value or null], ...]}]. `pick(run, step)` is called for a click. */
function makeChart(title, series, pick) {
  const known = series.flatMap((each) => each.points.filter(([, y]) => isNumber(y)));
  if (!known.length) return null;
  const bounds = findBounds(known);
  const readout = el('div', { class: 'readout' });
  const marker = svg('line', { class: 'marker', y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: 'hidden' });
  const picture = svg('svg', { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: 'img', 'aria-label': title },
    makeAxes(bounds), series.map((each) => makeCurve(each, bounds)), marker);
  const show = (step) => { readout.replaceChildren(); fill(readout, {}, readoutOf(series, step)); };
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
  return el('figure', { class: 'chart' }, el('figcaption', {}, title), picture, readout);
}

function findBounds(points) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const [x, y] of points) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
  if (y0 >= 0 && y0 < 0.4 * y1) y0 = 0;
  const unit = roundUp((y1 - y0) / 4 || Math.abs(y1) / 4 || 0.25);
  y0 = Math.floor(y0 / unit + 1e-9) * unit;
  y1 = Math.max(Math.ceil(y1 / unit - 1e-9) * unit, y0 + unit);
  return { x0, x1: x1 === x0 ? x0 + 1 : x1, y0, y1, unit };
}

/* The next of 1, 2, 2.5, 5 times a power of ten. */
function roundUp(size) {
  const power = 10 ** Math.floor(Math.log10(size));
  return power * [1, 2, 2.5, 5, 10].find((each) => each * power >= size * (1 - 1e-9));
}

function placeX(x, { x0, x1 }) {
  return CHART.left + ((x - x0) / (x1 - x0)) * (CHART.width - CHART.left - CHART.right);
}

function placeY(y, { y0, y1 }) {
  return CHART.height - CHART.bottom - ((y - y0) / (y1 - y0)) * (CHART.height - CHART.top - CHART.bottom);
}

function makeAxes(bounds) {
  const number = Math.round((bounds.y1 - bounds.y0) / bounds.unit);
  const parts = Array.from({ length: number + 1 }, (_, n) => {
    const value = bounds.y0 + n * bounds.unit;
    const y = placeY(value, bounds);
    return [svg('line', { class: 'rule', x1: CHART.left, x2: CHART.width - CHART.right, y1: y, y2: y }),
      svg('text', { x: CHART.left - 5, y: y + 3, 'text-anchor': 'end' }, format(Number(value.toPrecision(10)), 4))];
  });
  const ends = [[bounds.x0, 'start'], [bounds.x1, 'end']].map(([x, anchor]) =>
    svg('text', { x: placeX(x, bounds), y: CHART.height - 5, 'text-anchor': anchor }, format(x)));
  return svg('g', { class: 'axes' }, parts, ends);
}

function makeCurve({ run, points }, bounds) {
  const pieces = [];
  let piece = [];
  for (const [x, y] of [...points, [0, null]]) {
    if (isNumber(y)) piece.push([placeX(x, bounds), placeY(y, bounds)]);
    else if (piece.length) { pieces.push(piece); piece = []; }
  }
  return svg('g', { class: `curve run${run}` }, pieces.map((each) => (each.length === 1
    ? svg('circle', { cx: each[0][0].toFixed(2), cy: each[0][1].toFixed(2), r: 2.5 })
    : svg('polyline', { points: each.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join(' ') }))));
}

/* The values at a step; for null the last value of each run. */
function readoutOf(series, step) {
  const values = series.map((each) => {
    const found = each.points.findLast(([x, y]) => isNumber(y) && (step === null || x === step));
    return el('span', { class: `value run${each.run}`, title: each.name }, found ? format(found[1]) : '–');
  });
  return [el('span', { class: 'soft' }, step === null ? 'last ' : `step ${format(step)} `), values];
}
