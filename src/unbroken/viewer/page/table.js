// What rollouts are chosen by, in a step and in the table of all rollouts of a run: the filters are in the URL.
'use strict';

const SORTS = {
  group: ['as sampled', null],
  step: ['step', (each) => each.number],
  reward: ['reward', (each) => each.reward],
  ids: ['sampled ids', (each) => each.num_sampled],
  turns: ['turns', (each) => each.num_turns],
  mismatch: ['mismatch (largest difference)', (each) => each.max_abs],
  advantage: ['advantage', (each) => each.advantage],
  time: ['wall time', (each) => each.wall_time_s],
};
const FLAGS = {
  truncated: ['truncated', (each) => each.is_truncated],
  failed: ['failed', (each) => each.error !== null || ['failed', 'aborted', 'timeout'].includes(each.status)],
  forked: ['forked', (each) => each.num_rows > 1 || each.forks.length > 0],
  parse: ['parse failure', (each) => each.num_bad_calls > 0],
  tools: ['tool error', (each) => each.num_tool_errors > 0],
  untrained: ['not trained', (each) => each.is_trained === false && !each.set],
};
/* What of both is offered for the sequences of a Tinker server, beside the search. */
const OF_SEQUENCES = ['truncated', 'failed', 'group', 'ids'];
const RANGES = { reward: 'reward', value: 'component', ids: 'sampled ids', mismatch: 'mismatch', step: 'step' };
const WORDS = { text: 'q', status: 'status', fork: 'fork', set: 'set', part: 'part', problem: 'problem', label: 'label' };
const VIEWS = 'unbroken-views';
/* What was chosen stays for the next step. */
const choice = {};
clearChoice();
/* The list that was shown last: the next rollout is that of this list. */
let shownList = null;
let shownTable = null;

function clearChoice() {
  Object.assign(choice, { text: '', status: '', fork: '', set: '', part: '', problem: '', label: '', flags: new Set(), variance: false, sort: 'group', descending: true });
  for (const name of Object.keys(RANGES)) choice[name] = [null, null];
}

/* The choice as the query of a URL, and back. */
function writeChoice() {
  const query = new URLSearchParams();
  for (const [key, name] of Object.entries(WORDS)) if (choice[key]) query.set(name, choice[key]);
  for (const name of Object.keys(RANGES)) if (choice[name].some(isNumber)) query.set(name, choice[name].map((each) => each ?? '').join('..'));
  if (choice.flags.size) query.set('is', [...choice.flags].join(','));
  if (choice.variance) query.set('variance', '1');
  if (choice.sort !== 'group' || !choice.descending) query.set('sort', (choice.descending ? '-' : '') + choice.sort);
  return query.toString().replaceAll('%2C', ',');
}

function readChoice(text) {
  const query = new URLSearchParams(text);
  clearChoice();
  for (const [key, name] of Object.entries(WORDS)) choice[key] = query.get(name) ?? '';
  for (const name of Object.keys(RANGES)) {
    const ends = (query.get(name) ?? '').split('..');
    choice[name] = [ends[0], ends[ends.length - 1]].map((end) => (end && Number.isFinite(Number(end)) ? Number(end) : null));
  }
  choice.flags = new Set((query.get('is') ?? '').split(',').filter((flag) => flag in FLAGS));
  choice.variance = query.get('variance') === '1';
  const sort = query.get('sort') ?? '-group';
  choice.descending = sort.startsWith('-');
  choice.sort = sort.replace(/^-/, '');
  if (!(choice.sort in SORTS) && !choice.sort.startsWith('part:')) choice.sort = 'group';
}

function isIn([low, high], value) {
  return (low === null && high === null) || (isNumber(value) && value >= (low ?? -Infinity) && value <= (high ?? Infinity));
}

function isChosen(each) {
  const text = choice.text.toLowerCase();
  return (!choice.status || each.status === choice.status)
    && (!choice.problem || each.problem === choice.problem)
    && (!choice.fork || each.forks.includes(choice.fork))
    && (!choice.label || each.labels?.includes(choice.label))
    && (!choice.set || (each.set || 'training') === choice.set)
    && isIn(choice.reward, each.reward) && isIn(choice.ids, each.num_sampled) && (each.number === undefined || isIn(choice.step, each.number))
    && (!choice.part || isIn(choice.value, each[`part:${choice.part}`]))
    && (choice.mismatch[0] === null || (isNumber(each.max_abs) && each.max_abs > choice.mismatch[0]))
    && [...choice.flags].every((name) => FLAGS[name][1](each))
    && (!choice.variance || (each.varies ?? each.spread > 1e-9))
    && (!text || each.text.toLowerCase().includes(text));
}

function groupRollouts(trajectories) {
  const groups = new Map();
  for (const each of trajectories) {
    if (!groups.has(each.group)) groups.set(each.group, []);
    groups.get(each.group).push(each);
  }
  return groups;
}

/* How much the rewards of a rollout's group differ. */
function addSpreads(trajectories) {
  for (const members of groupRollouts(trajectories).values()) {
    const spread = deviation(members.map((each) => each.reward).filter(isNumber)) ?? 0;
    for (const each of members) each.spread = spread;
  }
  return trajectories;
}

function sortRollouts(found) {
  const read = choice.sort.startsWith('part:') ? (each) => each[choice.sort] : SORTS[choice.sort][1];
  const sign = choice.descending ? -1 : 1;
  const value = (each) => { const known = read(each); return isNumber(known) ? known * sign : Number.MAX_VALUE; };
  return read ? [...found].sort((a, b) => value(a) - value(b)) : found;
}

/* How many of the items have each of their values. */
function countBy(items, list) {
  const counts = new Map();
  for (const item of items) for (const value of list(item)) counts.set(value, (counts.get(value) ?? 0) + 1);
  return counts;
}

/* What there is to choose by among rollouts. */
function listOffers(rollouts) {
  const list = (read) => [...countBy(rollouts, read)].sort();
  const names = (read) => list(read).map(([name]) => name);
  return { statuses: names((each) => [each.status]), forks: list((each) => new Set(each.forks)), parts: names((each) => Object.keys(each).filter((key) => key.startsWith('part:')).map((key) => key.slice(5))), sets: [], labels: names((each) => each.labels ?? []),
    flags: Object.fromEntries(Object.entries(FLAGS).map(([name, [, read]]) => [name, rollouts.filter(read).length])) };
}

/* The filters of a list with these offers; `kind` is that of a store, 'table', or of a step nothing. */
function makeFilters(offers, kind, draw) {
  const areSequences = kind === 'tinker';
  const isRun = !(kind in NOUNS);
  const listOffered = (all) => Object.keys(all).filter((name) => (areSequences ? OF_SEQUENCES.includes(name) : name !== 'step' || kind === 'table'));
  // What was chosen elsewhere and is not offered here would hide lines without a word.
  if (!isRun) Object.assign(choice, { variance: false, part: '', label: '' });
  if (kind !== 'table') Object.assign(choice, { set: '', step: [null, null] });
  if (areSequences) Object.assign(choice, { status: '', fork: '', reward: [null, null], mismatch: [null, null], flags: new Set(OF_SEQUENCES.filter((name) => choice.flags.has(name))) });
  if (!listOffered(SORTS).includes(choice.sort) && !(isRun && choice.sort.startsWith('part:'))) choice.sort = 'group';
  const { statuses, sets } = offers;
  const forks = new Map(offers.forks);
  if (choice.fork && !forks.has(choice.fork)) forks.set(choice.fork, 0);
  const labels = [...new Set([...(offers.labels ?? []), choice.label])].filter(Boolean);
  const parts = isRun ? offers.parts : [];
  const changed = (action) => (event) => { action(event.target); draw(); };
  const number = (key, end, label, name) => el('label', {}, `${label} `, el('input', { type: 'number', step: 'any', id: `filter-${key}-${end}`, 'aria-label': name, value: choice[key][end] ?? undefined,
    input: changed((input) => { choice[key][end] = input.value === '' ? null : Number(input.value); }) }));
  const range = (key, ...before) => el('span', { class: 'range' }, before, number(key, 0, `${before.length ? '' : RANGES[key]} from`, `${RANGES[key]} from`), ' ', number(key, 1, 'to', `${RANGES[key]} to`));
  const flag = (name) => el('label', { class: 'flag' }, el('input', { type: 'checkbox', id: `filter-${name}`, checked: choice.flags.has(name),
    change: changed((input) => (input.checked ? choice.flags.add(name) : choice.flags.delete(name))) }), ` ${FLAGS[name][0]} (${offers.flags[name]})`);
  const select = (key, options, label) => el('select', { 'aria-label': label, id: `filter-${key}`, change: changed((input) => { [choice[key]] = options[input.selectedIndex]; }) },
    options.map(([value, text]) => el('option', { value: makeVisible(value), selected: choice[key] === value }, text)));
  const more = [areSequences ? null : [range('reward'), number('mismatch', 0, 'mismatch above', 'mismatch above')],
    parts.length ? range('value', select('part', [['', 'any component'], ...parts.map((part) => [part, makeVisible(part)])], 'component of the reward')) : null,
    range('ids'), kind === 'table' ? range('step') : null, listOffered(FLAGS).map(flag),
    isRun ? el('label', { class: 'flag' }, el('input', { type: 'checkbox', id: 'filter-variance', checked: choice.variance, change: changed((input) => { choice.variance = input.checked; }) }), ' groups with variance') : null];
  return el('form', { class: 'filters', submit: (event) => event.preventDefault() },
    el('input', { type: 'search', id: 'filter-text', placeholder: 'search in text  ( / )', 'aria-label': 'search in text', value: choice.text, input: changed((input) => { choice.text = input.value; }) }),
    areSequences ? null : select('status', [['', 'any status'], ...statuses.map((status) => [status, makeVisible(status)])], 'status'),
    sets.length > 1 ? select('set', [['', 'training and evaluations'], ...sets.map((set) => [set, makeVisible(set)])], 'set') : null,
    forks.size ? select('fork', [['', 'any fork or none'], ...[...forks].map(([reason, count]) => [reason, `fork: ${makeVisible(reason)} (${count})`])], 'fork reason') : null,
    labels.length ? select('label', [['', 'any label or none'], ...labels.map((label) => [label, `label: ${makeVisible(label)}`])], 'label') : null,
    el('span', { class: 'sort' }, 'sort by ', select('sort', [...listOffered(SORTS).map((key) => [key, SORTS[key][0]]), ...parts.map((part) => [`part:${part}`, makeVisible(part)])], 'sort by'),
      button('↑↓', 'ascending or descending', () => { choice.descending = !choice.descending; draw(); })),
    el('details', { class: 'more', open: !isNarrow() }, el('summary', {}, 'more filters'), el('div', {}, more.flat(2).filter(Boolean))));
}

/* The table of all rollouts of a run. The server filters and sorts, and answers with the first lines. */
async function showTable(index, run) {
  const size = shownRollout && shownTable?.run === run ? shownTable.size : isNarrow() ? 20 : 100;
  const state = { run, size, ticket: shown, results: el('div', { class: 'results' }), progress: el('p', { class: 'soft', id: 'count', 'aria-live': 'polite' }), form: el('div', {}) };
  state.change = () => { setHash(`#table/${run}?${writeChoice()}`); refreshTable(); };
  shownTable = state;
  const next = await askTable(state);
  if (next) refreshTable(next);
  return el('div', {}, el('h1', {}, 'Rollouts', el('span', { class: 'soft' }, ` of ${makeVisible(index.runs[run].name)}`)), state.form, makeSavedViews(run), state.progress, state.results);
}

/* Ask until all steps were read. */
async function refreshTable(next) {
  const state = shownTable;
  if (state?.ticket !== shown) return;
  try {
    do next = await askTable(state, next?.[0]); while (next);
  } catch (error) {
    state.progress.replaceChildren(makeVisible(error.message));
  }
}

/* Draw what is chosen now. If there are steps that were not read yet, the next answer is asked for before, and returned in a list. */
async function askTable(state, answer = findRollouts(state.run, writeChoice(), state.size)) {
  const query = writeChoice();
  const found = await answer;
  if (state.ticket !== shown || query !== writeChoice()) return null;
  const next = found.num_read < found.num_steps ? [findRollouts(state.run, query, state.size)] : null;
  const isNew = JSON.stringify(found.offers) !== JSON.stringify(state.found?.offers);
  state.found = found;
  if (isNew && !state.form.contains(document.activeElement)) drawForm(state);
  drawTable(state);
  return next;
}

/* What the server finds; an export has all lines, and the texts in its steps. */
async function findRollouts(run, query, size) {
  if (!isExport) return loadJson(`run/${run}/table/${encodeURIComponent(`${query}&size=${size}`)}`);
  const table = await getObject(`run/${run}/table`);
  if (choice.text && table.rows.some((each) => each.text === undefined)) {
    const read = (step) => getObject(`run/${run}/step/${step}`).catch(() => ({ trajectories: [] }));
    const steps = new Map(await Promise.all([...new Set(table.rows.map((each) => each.step))].map(async (step) => [step, await read(step)])));
    for (const each of table.rows) each.text = steps.get(each.step).trajectories[each.index]?.text ?? '';
  }
  const rows = sortRollouts(table.rows.filter(isChosen));
  const rewards = rows.map((each) => each.reward).filter(isNumber);
  return { ...table, rows: rows.slice(0, size), num_found: rows.length, reward: rewards.length ? [mean(rewards), deviation(rewards)] : null };
}

function drawForm(state) {
  const id = document.activeElement?.id;
  state.form.replaceChildren(makeFilters(state.found.offers, 'table', state.change));
  if (id?.startsWith('filter-')) document.getElementById(id)?.focus();
}

function drawTable(state) {
  const { run, found } = state;
  const { rows, num_found: total } = found;
  const query = writeChoice();
  const more = async () => { state.size *= 6; shownList.rows = (await findRollouts(run, query, state.size)).rows; };
  shownList = { run, rows, total, more, place: location.hash };
  state.progress.replaceChildren(`${total.toLocaleString('en')} of ${found.num_all.toLocaleString('en')} rollouts${found.reward ? ` · reward ${format(found.reward[0], 3)} ± ${format(found.reward[1], 3)}` : ''}${
    found.num_read < found.num_steps ? ` · ${found.num_read} of ${found.num_steps} steps read` : ''}`);
  const { id, href } = state.results.contains(document.activeElement) ? document.activeElement : {};
  const problems = found.problems.map((problem) => el('p', { class: 'problem' }, makeVisible(problem)));
  state.results.replaceChildren(...problems, makeTable(state, rows), ...(total > rows.length
    ? [button(`show ${Math.min(total - rows.length, 5 * state.size)} more of ${total}`, 'show more lines', () => { state.size *= 6; refreshTable(); })] : []));
  const focused = id ? document.getElementById(id) : href && [...state.results.querySelectorAll('tbody a')].find((each) => each.href === href);
  focused?.focus({ preventScroll: true });
}

function makeTable(state, rows) {
  const { parts } = state.found.offers;
  const columns = [['step', 'step', (each) => each.set ? `${each.number} ${makeVisible(each.set)}` : each.number], ['reward', 'reward', (each) => format(each.reward, 3)],
    ...(parts.length > 1 ? parts.slice(0, 6).map((part) => [`part:${part}`, makeVisible(part), (each) => format(each[`part:${part}`], 3)]) : []),
    [null, 'prompt', (each) => link(['problem', each.problem], makeStart(each.prompt, 70), { title: 'this problem at all steps', class: 'quiet', click: (event) => event.stopPropagation() })], [null, 'expected', (each) => makeCell(each.expected, 40)], [null, 'given', (each) => makeCell(each.given, 70)], ['ids', 'ids', (each) => each.num_sampled],
    ['turns', 'turns', (each) => each.num_turns], ['mismatch', 'mismatch', (each) => format(each.max_abs, 2)], ['advantage', 'advantage', (each) => format(each.advantage, 2)], ['time', 's', (each) => format(each.wall_time_s, 3)]];
  const known = { prompt: (each) => each.prompt, expected: (each) => each.expected !== null, mismatch: (each) => isNumber(each.max_abs), advantage: (each) => isNumber(each.advantage), s: (each) => isNumber(each.wall_time_s), turns: (each) => each.num_turns > 1 };
  const used = columns.filter(([, name]) => !(name in known) || rows.some(known[name]));
  const sortBy = (key) => { choice.descending = choice.sort === key ? !choice.descending : true; choice.sort = key; state.change(); drawForm(state); };
  const mark = (key) => (choice.sort === key ? (choice.descending ? ' ↓' : ' ↑') : '');
  return el('table', { class: 'rows' }, el('thead', {}, el('tr', {}, used.map(([key, name]) => el('th', { 'aria-sort': choice.sort === key ? (choice.descending ? 'descending' : 'ascending') : null },
    key ? el('button', { type: 'button', id: `sort-${key}`, title: `sort by ${name}`, click: () => sortBy(key) }, `${name}${mark(key)}`) : name)), el('th', {}, 'status'))),
  el('tbody', { click: (event) => event.target.closest('tr')?.querySelector('a').click() }, rows.map((each) => el('tr', { class: FLAGS.failed[1](each) ? 'failed' : null },
    used.map(([, name, read], n) => el('td', { 'data-name': name, class: ['prompt', 'expected', 'given'].includes(name) ? 'words' : 'number' }, n === 0 ? link(['rollout', state.run, each.step, each.index], read(each), { title: makeVisible(each.trajectory), click: (event) => event.stopPropagation() }) : read(each))),
    el('td', { class: 'marks' }, each.status === 'completed' ? null : el('span', { class: 'status odd' }, makeVisible(each.status)), listMarks(each).map((text) => el('span', { class: 'mark' }, makeVisible(text))))))));
}

/* The end of a text on a line: that is where an answer is. */
function makeCell(text, size) {
  const line = (text || '–').replace(/\s+/g, ' ');
  return makeVisible(line.length > size ? `… ${line.slice(-size)}` : line);
}

/* The beginning of a text on a line: that is where a question is. */
function makeStart(text, size) {
  const line = (text || '–').replace(/\s+/g, ' ');
  return makeVisible(line.length > size ? `${line.slice(0, size)} …` : line);
}

function listMarks(each) {
  return [each.is_truncated && each.status !== 'truncated' && 'truncated', ...each.forks.map((fork) => `fork: ${fork}`), each.num_bad_calls > 0 && plural(each.num_bad_calls, 'parse failure'),
    each.num_tool_errors > 0 && plural(each.num_tool_errors, 'tool error'), FLAGS.untrained[1](each) && 'not trained', ...(each.labels ?? []).map((label) => `label: ${label}`), each.note && 'note'].filter(Boolean);
}

/* Filters that were saved in this browser, by name. */
function makeSavedViews(run) {
  const node = el('p', { class: 'saved' });
  const read = () => { try { return JSON.parse(localStorage.getItem(VIEWS)) ?? {}; } catch { return {}; } };
  const write = (views) => { try { localStorage.setItem(VIEWS, JSON.stringify(views)); } catch { /* a page from a disk may have no storage */ } draw(); };
  const draw = () => {
    const views = read();
    const name = el('input', { type: 'text', size: 16, placeholder: 'name', 'aria-label': 'name of the view' });
    const save = () => { if (name.value.trim()) write({ ...views, [name.value.trim()]: writeChoice() }); };
    node.replaceChildren(el('span', { class: 'soft' }, 'Views: '), link(['table', `${run}?`], 'all'), ...Object.entries(views).flatMap(([title, query]) => [' · ', link(['table', `${run}?${query}`], makeVisible(title)),
      button('×', `remove ${title}`, () => { const { [title]: _, ...rest } = views; write(rest); })]), ' ', name, button('save this view', 'save the filters under a name, in this browser', save));
    name.addEventListener('keydown', (event) => { if (event.key === 'Enter') save(); });
  };
  draw();
  return node;
}

/* Keys in lists: the next and the previous line, and the search. */
function pressListKey(key) {
  if (key === '/') {
    document.getElementById('filter-text')?.focus();
    return Boolean(document.getElementById('filter-text'));
  }
  if (key !== 'j' && key !== 'k') return false;
  const links = [...document.querySelectorAll('.rows tbody a:not(.quiet), .rollouts a, .by-step .chip')].filter((each) => each.checkVisibility());
  const here = links.indexOf(document.activeElement);
  links[Math.min(links.length - 1, Math.max(0, here + (key === 'j' ? 1 : -1)))]?.focus();
  return links.length > 0;
}
