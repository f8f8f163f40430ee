// The step view: groups with their rewards, and the rollouts by what is asked for.
'use strict';

const SORTS = {
  group: ['as sampled', null],
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
  untrained: ['not trained', (each) => each.is_trained === false],
};
/* What of both is offered for the sequences of a Tinker server, beside the search. */
const OF_SEQUENCES = ['truncated', 'failed', 'group', 'ids'];
const MAX_LINES = 300;
/* What was chosen stays for the next step. */
const choice = { text: '', status: '', fork: '', flags: new Set(), low: null, high: null, mismatch: null, variance: false, sort: 'group', descending: true };

async function showStep(index, run, step) {
  const [numbers, summary] = await Promise.all([getObject(`run/${run}`), getObject(`run/${run}/step/${step}`)]);
  const results = el('div', { class: 'results' });
  const draw = () => drawRollouts(results, run, summary);
  const makeHead = { store: makeStoreHead, tinker: makeTinkerHead }[summary.kind] ?? makeStepHead;
  const view = el('div', {}, makeHead(index, run, step, numbers, summary), makeFilters(summary, draw), results);
  draw();
  return view;
}

function makeStepHead(index, run, step, numbers, summary) {
  const steps = numbers.recorded_steps;
  const place = steps.indexOf(step);
  const go = (n) => (steps[n] === undefined ? el('span', { class: 'soft' }, '–') : link(['step', run, steps[n]], String(steps[n])));
  const versions = [...new Set(summary.heads.map((head) => head.policy_version))].join(', ');
  const kept = summary.heads.reduce((sum, head) => sum + (head.num_kept ?? 0), 0);
  const all = summary.heads.reduce((sum, head) => sum + (head.num_groups ?? 0), 0);
  const rewards = summary.trajectories.map((each) => each.reward).filter(isNumber);
  const facts = [`policy version ${versions || '–'}`, `${kept} of ${plural(all, 'group')} kept`, plural(summary.trajectories.length, 'rollout'),
    `reward ${format(mean(rewards), 3)} ± ${format(deviation(rewards), 3)}`];
  return el('section', { class: 'head' }, el('h1', {}, `Step ${step}`, el('span', { class: 'soft' }, ` of ${makeVisible(index.runs[run].name)}`)),
    el('p', {}, facts.join(' · ')),
    el('nav', {}, 'previous ', go(place - 1), ' · next ', go(place + 1)),
    summary.problems.map((problem) => el('p', { class: 'problem' }, makeVisible(problem))));
}

function makeFilters(summary, draw) {
  const areSequences = summary.kind === 'tinker';
  const listOffered = (all) => Object.keys(all).filter((name) => !areSequences || OF_SEQUENCES.includes(name));
  // What was chosen elsewhere and is not offered here would hide lines without a word.
  if (summary.kind in NOUNS) choice.variance = false;
  if (areSequences) Object.assign(choice, { status: '', fork: '', low: null, high: null, mismatch: null, sort: OF_SEQUENCES.includes(choice.sort) ? choice.sort : 'group', flags: new Set(OF_SEQUENCES.filter((name) => choice.flags.has(name))) });
  const statuses = [...new Set(summary.trajectories.map((each) => makeVisible(each.status)))].sort();
  const forks = countBy(summary.trajectories, listForkReasons);
  if (choice.fork && !forks.has(choice.fork)) forks.set(choice.fork, 0);
  const changed = (action) => (event) => { action(event.target); draw(); };
  const number = (key, label) => el('label', {}, `${label} `, el('input', { type: 'number', step: 'any', value: choice[key] ?? undefined,
    input: changed((input) => { choice[key] = input.value === '' ? null : Number(input.value); }) }));
  const flag = (name) => {
    const count = summary.trajectories.filter(FLAGS[name][1]).length;
    const box = el('input', { type: 'checkbox', checked: choice.flags.has(name),
      change: changed((input) => (input.checked ? choice.flags.add(name) : choice.flags.delete(name))) });
    return el('label', { class: 'flag' }, box, ` ${FLAGS[name][0]} (${count})`);
  };
  const select = (key, options, label) => {
    const node = el('select', { 'aria-label': label, change: changed((input) => { choice[key] = input.value; }) },
      options.map(([value, text]) => el('option', { value, selected: choice[key] === value }, text)));
    return node;
  };
  return el('form', { class: 'filters', submit: (event) => event.preventDefault() },
    el('input', { type: 'search', placeholder: 'search in text', 'aria-label': 'search in text', value: choice.text, input: changed((input) => { choice.text = input.value; }) }),
    areSequences ? null : select('status', [['', 'any status'], ...statuses.map((status) => [status, status])], 'status'),
    forks.size ? select('fork', [['', 'any fork or none'], ...[...forks].sort().map(([reason, count]) => [reason, `fork: ${reason} (${count})`])], 'fork reason') : null,
    areSequences ? null : [number('low', 'reward from'), number('high', 'to'), number('mismatch', 'mismatch above')],
    listOffered(FLAGS).map(flag),
    summary.kind in NOUNS ? null : el('label', { class: 'flag' }, el('input', { type: 'checkbox', checked: choice.variance, change: changed((input) => { choice.variance = input.checked; }) }), ' groups with variance'),
    el('span', { class: 'sort' }, 'sort by ', select('sort', listOffered(SORTS).map((key) => [key, SORTS[key][0]]), 'sort by'),
      button('↑↓', 'ascending or descending', () => { choice.descending = !choice.descending; draw(); })));
}

function listForkReasons(each) {
  return [...new Set(each.forks.map(makeVisible))];
}

/* How many of the items have each of their values. */
function countBy(items, list) {
  const counts = new Map();
  for (const value of items.flatMap(list)) counts.set(value, (counts.get(value) ?? 0) + 1);
  return counts;
}

function isChosen(each) {
  const text = choice.text.toLowerCase();
  return (!choice.status || makeVisible(each.status) === choice.status)
    && (!choice.fork || listForkReasons(each).includes(choice.fork))
    && (choice.low === null || (isNumber(each.reward) && each.reward >= choice.low))
    && (choice.high === null || (isNumber(each.reward) && each.reward <= choice.high))
    && (choice.mismatch === null || (isNumber(each.max_abs) && each.max_abs > choice.mismatch))
    && [...choice.flags].every((name) => FLAGS[name][1](each))
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

function drawRollouts(node, run, summary) {
  const groups = groupRollouts(summary.trajectories);
  const spreads = new Map([...groups].map(([group, members]) => [group, deviation(members.map((each) => each.reward).filter(isNumber)) ?? 0]));
  const found = summary.trajectories.filter((each) => isChosen(each) && (!choice.variance || spreads.get(each.group) > 1e-9));
  const bounds = findRewardBounds(summary.trajectories);
  const cut = choice.text && summary.trajectories.some((each) => each.is_text_cut);
  node.replaceChildren(el('div', {},
    el('p', { class: 'soft', id: 'count' }, `${found.length} of ${plural(summary.trajectories.length, NOUNS[summary.kind] ?? 'rollout')}`,
      cut ? `; a search looks at the first ${summary.max_text} characters of each` : ''),
    choice.sort === 'group' && !(summary.kind in NOUNS) ? drawGroups(run, summary, groups, spreads, new Set(found), bounds) : drawSorted(run, summary, found)));
}

function findRewardBounds(trajectories) {
  const rewards = trajectories.map((each) => each.reward).filter(isNumber);
  return rewards.length ? [Math.min(0, ...rewards), Math.max(...rewards)] : [0, 1];
}

function drawGroups(run, summary, groups, spreads, found, bounds) {
  return [...groups].map(([group, members]) => {
    const shown = members.filter((each) => found.has(each));
    if (!shown.length) return null;
    const rewards = members.map((each) => each.reward).filter(isNumber);
    const variance = spreads.get(group) > 1e-9 ? `± ${format(spreads.get(group), 3)}` : 'no variance';
    return el('section', { class: 'group' },
      el('h2', {}, `Group ${makeVisible(group)} `, el('span', { class: 'soft' }, `reward ${format(mean(rewards), 3)}, ${variance}`)),
      makeStrip(run, summary.step, members, found, bounds), makeLines(run, summary.step, shown));
  }).filter(Boolean);
}

function drawSorted(run, summary, found) {
  const read = SORTS[choice.sort][1];
  if (!read) return makeLines(run, summary.step, found);
  const sign = choice.descending ? -1 : 1;
  const value = (each) => (isNumber(read(each)) ? read(each) * sign : Number.MAX_VALUE);
  return makeLines(run, summary.step, [...found].sort((a, b) => value(a) - value(b)));
}

/* A bar for each member of a group, as high as its reward. */
function makeStrip(run, step, members, found, [low, high]) {
  return el('div', { class: 'strip', 'aria-hidden': 'true' }, members.map((each) => {
    const bar = el('i', {});
    bar.style.height = isNumber(each.reward) ? `${4 + 96 * ((each.reward - low) / (high - low || 1))}%` : '4%';
    return link(['rollout', run, step, each.index], bar, { class: `bar${found.has(each) ? '' : ' faint'}${each.error === null ? '' : ' failed'}`,
      tabindex: -1, title: makeVisible(`${each.trajectory}: reward ${format(each.reward)}, ${each.status}`) });
  }));
}

function makeLines(run, step, members) {
  const list = el('ol', { class: 'rollouts' }, members.slice(0, MAX_LINES).map((each) => makeRolloutLine(run, step, each)));
  if (members.length <= MAX_LINES) return list;
  const more = button(`show all ${members.length}`, 'show the rest', () => {
    list.append(...members.slice(MAX_LINES).map((each) => makeRolloutLine(run, step, each)));
    more.remove();
  });
  return [list, more];
}

function makeRolloutLine(run, step, each) {
  const marks = [each.is_truncated && 'truncated', ...each.forks.map((fork) => `fork: ${fork}`), each.num_bad_calls > 0 && plural(each.num_bad_calls, 'parse failure'),
    each.num_tool_errors > 0 && plural(each.num_tool_errors, 'tool error'), each.is_trained === false && 'not trained'].filter(Boolean);
  const facts = [each.note, ...(each.is_sequence ? [] : [each.model && `model ${each.model}`, plural(each.num_turns, 'turn')]), `${each.num_sampled} sampled`, isNumber(each.max_abs) && `mismatch ${format(each.max_abs, 2)}`,
    isNumber(each.advantage) && `advantage ${format(each.advantage, 3)}`, each.num_rows > 1 && `${each.num_rows} branches`];
  return el('li', {}, link(['rollout', run, step, each.index], [
    !each.is_sequence && el('b', { class: 'reward' }, format(each.reward, 3)), el('span', { class: 'name' }, makeVisible(each.trajectory)),
    !(each.is_sequence && each.error === null) && el('span', { class: `status ${['completed', 'open', 'finished'].includes(each.status) ? '' : 'odd'}` }, makeVisible(each.status)),
    el('span', { class: 'soft' }, makeVisible(facts.filter(Boolean).join(' · '))),
    marks.map((mark) => el('span', { class: 'mark' }, makeVisible(mark))),
    each.error && el('span', { class: 'problem' }, makeVisible(each.error).slice(0, 200)),
    el('span', { class: 'snippet' }, makeSnippet(each)),
  ]));
}

/* The text around what is searched for, or its end: what the policy said last. A sequence begins with it. */
function makeSnippet({ text, is_sequence: isSequence }) {
  const found = choice.text ? text.toLowerCase().indexOf(choice.text.toLowerCase()) : -1;
  if (found < 0) return makeVisible((isSequence ? text.slice(0, 140) : text.slice(-140)).replace(/\s+/g, ' '));
  const stop = found + choice.text.length;
  const show = (part) => makeVisible(part.replace(/\s+/g, ' '));
  return [show(text.slice(Math.max(0, found - 60), found)), el('mark', {}, show(text.slice(found, stop))), show(text.slice(stop, stop + 70))];
}
