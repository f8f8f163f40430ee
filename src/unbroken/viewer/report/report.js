// A report draws its ids and charts with the viewer's pieces. What they show is JSON beside the place, which is text.
'use strict';

const CHANGED = [214, 70, 50];
const KINDS = {
  prompt: ['prompt', paint(HUES[0], 0.15)],
  sampled: ['sampled: trained on', paint(HUES[1], 0.6)],
  bridge: ["bridge: the template's text between turns", paint(HUES[2], 0.6)],
  message: ['text of a tool or user', paint(HUES[3], 0.6)],
  changed: ['differs', paint(CHANGED, 0.7)],
};

function drawIds(place) {
  const tokens = JSON.parse(place.querySelector('script').textContent);
  if (!tokens.length) return;
  const texts = Object.fromEntries(tokens.map((token) => [token.token_id, token.text]));
  const panel = el('div', { class: 'inspector' });
  const show = (n) => {
    const token = tokens[n];
    const facts = token && [`position ${n}`, `id ${token.token_id}`, JSON.stringify(makeVisible(token.text)), KINDS[token.origin][0], token.is_changed && 'differs', token.note];
    panel.replaceChildren(...(facts ? facts.filter(Boolean).map((fact) => el('span', {}, fact)) : [el('span', { class: 'soft' }, `${plural(tokens.length, 'id')}; point at one.`)]));
  };
  const data = { ids: Int32Array.from(tokens.map((token) => token.token_id)), length: tokens.length };
  const grid = new TokenGrid({ texts }, data, { onSelect: (n) => { grid.select(n); show(n); }, onHover: (n) => show(n < 0 ? grid.selected : n) });
  grid.paint((n) => KINDS[tokens[n].is_changed ? 'changed' : tokens[n].origin][1]);
  place.append(grid.node, panel);
  grid.layOut();
  // A long prompt is scrolled past, up to its end.
  const first = tokens.findIndex((token) => token.is_changed || token.origin !== 'prompt');
  if (first > 0) grid.node.scrollTop = Math.max(0, grid.lineOf(first) - 2) * LINE_PX;
  grid.draw();
  show(-1);
}

function drawChart(place) {
  const series = JSON.parse(place.querySelector('script').textContent);
  const drawn = makeChart(place.dataset.title, series.map((each, run) => ({ run, ...each })), null);
  if (!drawn) return;
  const names = series.map((each, run) => el('span', { class: `run${run}` }, el('span', { class: 'dot' }), makeVisible(each.name)));
  place.append(el('p', { class: 'legend' }, names), drawn);
}

for (const place of document.querySelectorAll('.origins')) {
  place.append(...Object.values(KINDS).map(([name, color]) => {
    const node = el('span', {}, name);
    node.style.backgroundColor = color;
    return node;
  }));
}
document.querySelectorAll('.ids').forEach(drawIds);
document.querySelectorAll('.drawn').forEach(drawChart);
