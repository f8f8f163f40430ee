// What the usual pipeline, which decodes, renders and tokenises again, would have made of a rollout.
'use strict';

const MAX_CHANGES = 200;

/* It is read when it is opened, and stays open for other branches and rollouts. */
let isRetokenisedOpen = false;

function makeRetokenised(state) {
  const { run, step, number, row } = state;
  const body = el('div', {});
  const load = async (event) => {
    isRetokenisedOpen = event.target.open;
    if (!isRetokenisedOpen || body.childElementCount) return;
    body.replaceChildren(el('p', { class: 'soft' }, 'Retokenising.'));
    try {
      const found = await getObject(`run/${run}/step/${step}/rollout/${number}/retokenised`);
      showRetokenised(state, body, found.problem ? found : found.rows[row] ?? { problem: 'There are too many branches to compare this one.' }, row);
    } catch (error) {
      body.replaceChildren(el('p', { class: 'problem' }, makeVisible(error.message)));
    }
  };
  return el('details', { class: 'retokenised', open: isRetokenisedOpen, toggle: load }, el('summary', {}, 'What retokenising would have made of it'), body);
}

function showRetokenised(state, body, found, row) {
  if (found.problem) {
    body.replaceChildren(el('p', { class: 'soft' }, makeVisible(found.problem)));
    return;
  }
  const texts = { ...state.rollout.texts, ...found.texts };
  const causes = [...new Set(found.changes.flatMap((change) => change.causes))];
  const summary = found.changes.length
    ? `${found.num_changed} of ${plural(found.num_sampled, 'sampled id')} would not be trained on: ${plural(found.changes.length, 'stretch', 'stretches')}, ${found.token_ids.length} ids in all instead of ${found.num_ids}`
    : `Nothing: the same ${plural(found.num_ids, 'id')}.`;
  const ids = Int32Array.from(found.token_ids);
  const cause = new Int8Array(ids.length).fill(-1);
  for (const change of found.changes) cause.fill(causes.indexOf(change.causes[0]), ...change.after);
  const place = el('p', { class: 'inspector short' });
  const show = (n) => place.replaceChildren(n < 0 ? '' : `${n}: id ${ids[n]} ${texts[ids[n]] === undefined ? '' : JSON.stringify(makeVisible(texts[ids[n]]))}`);
  const grid = new TokenGrid({ texts }, { ids, length: ids.length }, { onSelect: show, onHover: show });
  requestAnimationFrame(() => { grid.layOut(); grid.select(found.changes[0]?.after[0] ?? -1, { center: true }); });
  grid.paint((n) => (cause[n] < 0 ? '' : paint(HUES[3 + (cause[n] % 5)], 0.6)));
  if (!found.changes.length) {
    body.replaceChildren(el('p', {}, summary));
    return;
  }
  body.replaceChildren(el('p', {}, summary),
    el('div', { class: 'legend' }, causes.map((name, n) => {
      const node = el('span', {}, makeVisible(found.cause_words[name] ?? name));
      node.style.backgroundColor = paint(HUES[3 + (n % 5)], 0.6);
      return node;
    })),
    el('ul', { class: 'changes' }, found.changes.slice(0, MAX_CHANGES).map((change) => el('li', {},
      button(String(change.before[0]), 'show it', () => jumpToPosition(state, row, change.before[0])), ' ',
      el('code', {}, spellRange(texts, state.rollout.record.rows[row].token_ids, change.before)), ' → ',
      el('code', {}, spellRange(texts, found.token_ids, change.after)), ' ',
      el('span', { class: 'soft' }, change.causes.map((name) => makeVisible(found.cause_words[name] ?? name)).join(', ')))),
    found.changes.length > MAX_CHANGES ? el('li', { class: 'soft' }, `and ${found.changes.length - MAX_CHANGES} more`) : null),
    el('div', { class: 'grid-frame' }, grid.node), place,
    button('copy ids', 'copy the retokenised ids as JSON', () => copyText(JSON.stringify(found.token_ids))));
}

/* The texts of ids [start, stop), each apart. */
function spellRange(texts, ids, [start, stop]) {
  if (start === stop) return '∅';
  const shown = ids.slice(start, Math.min(stop, start + 12)).map((id) => cellText(texts[id], id)).join('|');
  return stop - start > 12 ? `${shown}| … ${stop - start} ids` : shown;
}
