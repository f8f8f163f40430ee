// The parts of a run on several machines: how each is, its versions and restarts, and when it was there.
'use strict';

const ENDS = ['restart', 'lost', 'died', 'end'];

function makeCluster(run) {
  const { parts, nodes, versions } = run.cluster.state;
  const shown = Object.entries(versions).map(([version, number]) => `${version} on ${number}`).join(', ');
  const row = (part) => el('tr', {}, [part.name, part.state, part.node, part.url, part.version ?? '', part.restarts, part.reason]
    .map((text) => el('td', {}, makeVisible(text))));
  const head = ['part', 'state', 'node', 'URL', 'version', 'restarts', 'the last because'];
  return el('section', { class: 'timeline' }, el('h2', {}, `Cluster of ${makeVisible(run.name)}`),
    el('p', { class: 'soft' }, makeVisible(`${plural(nodes.length, 'node')}; versions at engines: ${shown || 'none'}`)),
    el('table', {}, el('tr', {}, head.map((text) => el('th', {}, text))), parts.map(row)), makeLives(run.cluster));
}

/* When each node and part was there: a lane each, from what it said to its end. */
function makeLives({ events, state }) {
  const lives = new Map();
  for (const event of events) {
    const name = event.part || `node ${event.node}`;
    if (!lives.has(name)) lives.set(name, []);
    const bars = lives.get(name);
    const last = bars[bars.length - 1];
    if (['serves', 'joined', 'trains'].includes(event.what)) bars.push({ start: event.time_s, text: `${event.what} ${event.node} ${event.reason}` });
    else if (ENDS.includes(event.what) && last && last.stop === undefined) Object.assign(last, { stop: event.time_s, why: event.reason });
  }
  const times = events.map((event) => event.time_s);
  const start = Math.min(...times);
  const length = Math.max(state.time_s, ...times) - start || 1;
  return [...lives].filter(([, bars]) => bars.length).map(([name, bars]) => el('div', { class: 'lane part' }, el('span', { class: 'soft' }, makeVisible(name)),
    el('div', {}, bars.map((bar) => {
      const title = makeVisible(`${name}: ${bar.text}, from ${format(bar.start - start, 4)} s${bar.stop === undefined ? '' : ` to ${format(bar.stop - start, 4)} s ${bar.why}`}`);
      const node = el('span', { class: 'time', title });
      return placeBar(node, (bar.start - start) / length, ((bar.stop ?? start + length) - start) / length, paint(name.startsWith('node') ? HUES[2] : HUES[1], 0.7));
    }))));
}
