// The step view: groups with their rewards, and the rollouts by what is asked for.
'use strict';

const MAX_LINES = 100;

async function showStep(index, run, step) {
  const [numbers, summary] = await Promise.all([getObject(`run/${run}`), getObject(`run/${run}/step/${step}`)]);
  addSpreads(summary.trajectories);
  if (!isNumber(step)) for (const each of summary.trajectories) each.set = decodeURIComponent(step.split('@')[1]);
  const results = el('div', { class: 'results' });
  const draw = () => drawRollouts(results, run, summary);
  const change = () => { setHash(`#step/${run}/${step}?${writeChoice()}`); draw(); };
  const makeHead = { store: makeStoreHead, tinker: makeTinkerHead }[summary.kind] ?? makeStepHead;
  const view = el('div', {}, makeHead(index, run, step, numbers, summary), makeFilters(listOffers(summary.trajectories), summary.kind, change), results);
  draw();
  return view;
}

/* A step or an evaluation in words. */
function nameStep(step) {
  const [number, set] = String(step).split('@');
  if (set === undefined) return `step ${number}`;
  return `evaluation ${set === 'evaluation' ? '' : `${decodeURIComponent(set)} `}after ${plural(Number(number), 'step')}`;
}

function makeStepHead(index, run, step, numbers, summary) {
  const sum = (read) => summary.heads.reduce((total, head) => total + (read(head) ?? 0), 0);
  const versions = [...new Set(summary.heads.map((head) => head.policy_version))].join(', ');
  const all = sum((head) => head.num_groups);
  const kept = sum((head) => head.num_kept);
  const numRollouts = sum((head) => head.num_rollouts) || summary.trajectories.length;
  const facts = [`policy version ${versions || '–'}`, `${plural(numRollouts, 'rollout')} in ${plural(all, 'group')}`, kept < all && `${plural(summary.trajectories.length, 'rollout')} in ${plural(kept, 'group')} kept`,
    describeRewards(numbers, step, summary)];
  return el('section', { class: 'head' }, el('h1', {}, makeVisible(nameStep(step).replace(/^./, (letter) => letter.toUpperCase())), el('span', { class: 'soft' }, ` of ${makeVisible(index.runs[run].name)}`)),
    el('p', {}, makeVisible(facts.filter(Boolean).join(' · '))), makeScrubber(run, numbers, step),
    summary.problems.map((problem) => el('p', { class: 'problem' }, makeVisible(problem))));
}

/* The rewards of the whole step, by its metrics or what its processes counted, or at least of what was kept. */
function describeRewards(numbers, step, summary) {
  const counted = summary.heads.map((head) => head.rewards).filter((rewards) => rewards?.[0]);
  const number = counted.reduce((total, [each]) => total + each, 0);
  const middle = counted.reduce((total, [each, value]) => total + each * value, 0) / number;
  const spread = Math.sqrt(counted.reduce((total, [each, value, own]) => total + each * (own ** 2 + (value - middle) ** 2), 0) / number);
  const logged = numbers.metrics.values['reward/mean']?.[numbers.metrics.steps.indexOf(step)];
  if (number) return `reward ${format(isNumber(logged) ? logged : middle, 3)} ± ${format(spread, 3)}`;
  if (isNumber(logged)) return `reward ${format(logged, 3)}`;
  const rewards = summary.trajectories.map((each) => each.reward).filter(isNumber);
  return `reward ${format(mean(rewards), 3)} ± ${format(deviation(rewards), 3)} of those kept`;
}

/* Go through the steps with rollouts: a slider, and a link to the step that it stands at. */
function makeScrubber(run, numbers, current) {
  const isSet = typeof current === 'string';
  const own = (step) => (isSet ? String(step).split('@')[1] === current.split('@')[1] : isNumber(step));
  const steps = numbers.recorded_steps.filter(own);
  if (!steps.length) return null;
  const start = current === undefined ? steps.length - 1 : Math.max(0, steps.indexOf(current));
  const place = el('span', {});
  const go = (n) => (steps[n] === undefined ? null : goTo(`#step/${run}/${steps[n]}`));
  const draw = () => {
    const step = steps[slider.value];
    const reward = numbers.metrics.values['reward/mean']?.[numbers.metrics.steps.indexOf(step)];
    slider.setAttribute('aria-valuetext', nameStep(step));
    place.replaceChildren(link(['step', run, step], makeVisible(nameStep(step))), el('span', { class: 'soft' }, ` of ${Number.parseInt(steps[steps.length - 1], 10)}${isNumber(reward) ? ` · reward ${format(reward, 3)}` : ''}`));
  };
  const slider = el('input', { type: 'range', id: `scrubber-${run}`, min: 0, max: steps.length - 1, value: start, 'aria-label': 'step', input: draw,
    change: () => current !== undefined && go(slider.value), keydown: (event) => event.key === 'Enter' && go(slider.value) });
  slider.value = start;
  draw();
  if (steps.length === 1) return current === undefined ? place : null;
  return el('nav', { class: 'scrubber' }, button('‹', 'the step before', () => go(Number(slider.value) - 1)), slider, button('›', 'the next step', () => go(Number(slider.value) + 1)), place);
}

function drawRollouts(node, run, summary) {
  const groups = groupRollouts(summary.trajectories);
  const found = summary.trajectories.filter((each) => isChosen(each));
  const rows = sortRollouts(found);
  const cut = choice.text && summary.trajectories.some((each) => each.is_text_cut);
  const isGrouped = choice.sort === 'group' && !(summary.kind in NOUNS) && groups.size < summary.trajectories.length;
  shownList = { run, step: summary.step, rows, place: location.hash };
  node.replaceChildren(el('div', {},
    el('p', { class: 'soft', id: 'count' }, `${found.length} of ${plural(summary.trajectories.length, NOUNS[summary.kind] ?? 'rollout')}`,
      cut ? `; a search looks at the first ${summary.max_text} characters of each` : ''),
    isGrouped ? drawGroups(run, summary, groups, new Set(found), findRewardBounds(summary.trajectories)) : makeLines(run, summary.step, rows)));
}

function findRewardBounds(trajectories) {
  const rewards = trajectories.map((each) => each.reward).filter(isNumber);
  return rewards.length ? [Math.min(0, ...rewards), Math.max(...rewards)] : [0, 1];
}

/* Of many groups the lines are folded: a strip is enough to choose by. */
function drawGroups(run, summary, groups, found, bounds) {
  const isFolded = found.size > (isNarrow() ? 20 : 100);
  const drawn = [...groups].map(([group, members]) => {
    const shown = members.filter((each) => found.has(each));
    if (!shown.length) return null;
    const rewards = members.map((each) => each.reward).filter(isNumber);
    const spread = members[0].spread;
    const lines = makeLines(run, summary.step, shown);
    return el('section', { class: 'group' },
      el('h2', {}, `Group ${makeVisible(group)} `, el('span', { class: 'soft' }, `reward ${format(mean(rewards), 3)}, ${spread > 1e-9 ? `± ${format(spread, 3)}` : 'no variance'}`)),
      members[0].prompt ? el('p', { class: 'snippet' }, link(['problem', members[0].problem], makeStart(members[0].prompt, 120), { title: 'this problem at all steps', class: 'quiet' })) : null,
      makeStrip(run, summary.step, members, found, bounds), isFolded ? el('details', {}, el('summary', {}, plural(shown.length, 'rollout')), lines) : lines);
  }).filter(Boolean);
  return el('div', { class: isFolded ? 'folded' : null }, drawn);
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
  const size = isNarrow() ? 20 : MAX_LINES;
  const list = el('ol', { class: 'rollouts' }, members.slice(0, size).map((each) => makeRolloutLine(run, step, each)));
  if (members.length <= size) return list;
  const more = button(`show all ${members.length}`, 'show the rest', () => {
    list.append(...members.slice(size).map((each) => makeRolloutLine(run, step, each)));
    more.remove();
  });
  return [list, more];
}

function makeRolloutLine(run, step, each) {
  const facts = [each.note, ...(each.is_sequence ? [] : [each.model && `model ${each.model}`, plural(each.num_turns, 'turn')]), `${each.num_sampled} sampled`, isNumber(each.max_abs) && `mismatch ${format(each.max_abs, 2)}`,
    isNumber(each.advantage) && `advantage ${format(each.advantage, 3)}`, each.num_rows > 1 && `${each.num_rows} branches`, each.expected && `expected ${makeCell(each.expected, 40)}`];
  return el('li', {}, link(['rollout', run, step, each.index], [
    !each.is_sequence && el('b', { class: 'reward' }, format(each.reward, 3)), el('span', { class: 'name' }, makeVisible(each.trajectory)),
    !(each.is_sequence && each.error === null) && el('span', { class: `status ${['completed', 'open', 'finished'].includes(each.status) ? '' : 'odd'}` }, makeVisible(each.status)),
    el('span', { class: 'soft' }, makeVisible(facts.filter(Boolean).join(' · '))),
    listMarks(each).map((mark) => el('span', { class: 'mark' }, makeVisible(mark))),
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
