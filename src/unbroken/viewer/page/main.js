// Which view is shown: by the hash of the URL. `#run?CURVES`, `#table/RUN?FILTERS`, `#step/RUN/STEP?FILTERS`,
// `#rollout/RUN/STEP/NUMBER/ROW/TURN/POSITION`, `#problem/PROBLEM`,
// `#pair/RUN/STEP/NUMBER/RUN/STEP/NUMBER`. STEP is a number, or that of an evaluation: NUMBER@SET.
'use strict';

const VIEWS_OF_ROLLOUTS = ['table', 'step', 'rollout', 'problem', 'pair'];
const POLL_MS = 4000;
let shown = 0;
let known = null;
const keys = [];

async function route() {
  const ticket = ++shown;
  const hash = location.hash;
  const [place, query] = hash.slice(1).split('?');
  const [kind, ...rest] = place.split('/');
  const numbers = rest.map((part) => (/^\d+$/.test(part) ? Number(part) : /^\d+@[\w.~%-]+$/.test(part) ? part : undefined));
  const isRun = !VIEWS_OF_ROLLOUTS.includes(kind);
  if (query !== undefined && !isRun) readChoice(query);
  if (query !== undefined && isRun) look = readLook(query);
  const view = document.getElementById('view');
  const before = shownRollout;
  const { id } = document.activeElement ?? {};
  try {
    forgetTexts();
    known ??= await getObject('index');
    drawTop(known, kind, kind === 'problem' || kind === 'pair' ? [] : numbers);
    const node = await (kind === 'problem' ? showProblem(known, rest[0]) : makeView(known, kind, numbers));
    if (ticket !== shown) return;
    if (kind !== 'rollout') shownRollout = null;
    view.replaceChildren(node);
    if (kind !== 'rollout') window.scrollTo(0, 0);
    if (id) document.getElementById(id)?.focus();
    else if (before && kind !== 'rollout') findLine(before)?.focus();
  } catch (error) {
    if (ticket !== shown) return;
    shownRollout = null;
    view.replaceChildren(el('p', { class: 'problem' }, makeVisible(error.message)));
  }
  routed = hash;
  while (keys.length && location.hash === routed) press(keys.shift());
}

/* The line of a rollout in a list: whoever comes back goes on from there. */
function findLine({ run, step, number }) {
  return document.querySelector(`.results a:not(.bar)[href="${CSS.escape(`#rollout/${run}/${step}/${number}`)}"]`);
}

function press(key) {
  return pressRolloutKey(key) || (!shownRollout && pressListKey(key));
}

function makeView(index, kind, numbers) {
  const [run, step, number, row, turn, token] = numbers;
  if (kind === 'table' && index.runs[run]?.kind === 'run') return showTable(index, run);
  if (kind === 'step' && index.runs[run] && step !== undefined) return showStep(index, run, step);
  if (kind === 'pair' && index.runs[run]?.kind === 'run' && number !== undefined) return showPair(index, numbers);
  if (kind === 'rollout' && index.runs[run] && number !== undefined) return showRollout(index, run, step, number, row, turn, token);
  if (index.runs.length === 1 && index.runs[0].kind === 'store') return showStore(index);
  return showRun(index);
}

function drawTop(index, kind, [run, step, number]) {
  const places = [link([placeOfRun()], index.runs.length > 1 ? plural(index.runs.length, 'run') : makeVisible(index.runs[0].name))];
  const own = run ?? (index.runs.length === 1 ? 0 : undefined);
  if (index.runs[own]?.kind === 'run') places.push(link(['table', `${own}?`], 'all rollouts'));
  if (step !== undefined) places.push(link(['step', run, step], isStore(index, run) ? namePage(step) : makeVisible(nameStep(step))));
  if (number !== undefined) places.push(el('span', {}, isStore(index, run) ? nameSession(step, number) : `rollout ${number}`));
  if (kind === 'problem' || kind === 'pair') places.push(el('span', {}, kind === 'pair' ? 'side by side' : kind));
  document.title = `${places.map((place) => place.textContent).join(' · ')} – unbroken view`;
  document.getElementById('top').replaceChildren(el('b', {}, 'unbroken'), ...places,
    el('span', { class: 'soft live' }, isExport ? 'exported' : [...new Set(index.runs.map((each) => each.state))].join(', ')),
    button('◐', 'dark or light', switchTheme));
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
  try { localStorage.setItem('unbroken-theme', root.dataset.theme); } catch { /* a page from a disk may have no storage */ }
}

function restoreTheme() {
  try {
    const theme = localStorage.getItem('unbroken-theme');
    if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
  } catch { /* likewise */ }
}

/* A run that goes on: what changed is read anew. Only the curves move by themselves, under the eyes of who reads them. */
async function poll() {
  if (document.hidden) return;
  try {
    const index = await loadJson('index');
    const changed = index.runs.flatMap((run, n) => (run.revision === known?.runs[n]?.revision ? [] : [n]));
    known = index;
    for (const path of [...objects.keys()]) {
      if (changed.some((n) => path === `run/${n}` || path.startsWith(`run/${n}/`))) objects.delete(path);
    }
    const isRun = !VIEWS_OF_ROLLOUTS.includes(location.hash.slice(1).split(/[/?]/)[0]);
    const isUsed = document.querySelector('details.metrics[open], .chart:hover');
    const top = window.scrollY;
    if (changed.length && isRun && !isUsed) await route();
    if (changed.length && location.hash.startsWith('#table/')) await refreshTable();
    if (window.scrollY !== top) window.scrollTo(0, top);
  } catch {
    document.querySelector('.live')?.replaceChildren('the server has ended');
  }
}

addEventListener('hashchange', route);
addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== 'checkbox') return;
  if (location.hash === routed ? press(event.key) : isKept(event.key)) event.preventDefault();
});

/* While a view is made, what is pressed waits for it. */
function isKept(key) {
  if (key.length > 1 && !/^(Arrow(Left|Right)|Escape)$/.test(key)) return false;
  keys.push(key);
  return true;
}

restoreTheme();
route();
if (!isExport) setInterval(poll, POLL_MS);
