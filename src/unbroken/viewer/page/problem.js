// One problem: all its rollouts, at every step and evaluation of all runs that are shown. `#problem/PROBLEM`.
'use strict';

async function showProblem(index, problem) {
  const known = await findRunsOfProblem(index, problem);
  const rows = known.flatMap((run) => run.rows);
  if (!rows.length) throw new Error('no rollout of this problem was kept');
  const newest = known[0].rows.at(-1);
  return el('div', { class: 'of-problem' }, el('h1', {}, 'Problem ', el('span', { class: 'soft' }, `${plural(rows.length, 'rollout')} of ${known.map((run) => makeVisible(run.name)).join(', ')}`)),
    el('pre', { class: 'question' }, makeVisible(rows[0].prompt ?? '–')), rows[0].expected === null ? null : el('p', {}, el('span', { class: 'soft' }, 'expected '), el('code', {}, makeVisible(rows[0].expected))),
    rows.length > 1 ? el('p', {}, link(['pair', known[0].number, newest.step, newest.index], known.length > 1 ? `${makeVisible(known[0].name)} and ${makeVisible(known[1].name)} side by side` : 'two of them side by side')) : null,
    layCharts(makeProblemCharts(known)), el('div', { class: 'lists' }, known.map((run) => makeProblemList(run, index.runs.length > 1, findRewardBounds(rows)))));
}

/* The runs that have rollouts of a problem, with them. */
async function findRunsOfProblem(index, problem) {
  const runs = index.runs.map((run, number) => ({ number, name: run.name, kind: run.kind })).filter((run) => run.kind === 'run');
  for (const run of runs) run.rows = await findOfProblem(run.number, problem);
  return runs.filter((run) => run.rows.length);
}

/* The rollouts of a problem in a run, by step. Their files may have to be read first. */
async function findOfProblem(run, problem) {
  if (isExport) return (await getObject(`run/${run}/table`)).rows.filter((each) => each.problem === problem).sort((a, b) => a.number - b.number);
  for (;;) {
    const found = await loadJson(`run/${run}/table/${encodeURIComponent(`problem=${problem}&sort=step`)}`);
    if (found.num_read === found.num_steps) return found.rows;
  }
}

/* The rollouts by what the list calls them: training, or the set of an evaluation. */
function groupBy(rows, read) {
  const groups = new Map();
  for (const each of rows) {
    const key = read(each);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(each);
  }
  return groups;
}

/* The mean reward by step: one chart for training, one for each set that was evaluated. */
function makeProblemCharts(runs) {
  const sets = [...new Set(runs.flatMap((run) => run.rows.map((each) => each.set)))].sort();
  return sets.map((set) => makeChart(makeVisible(set ? `reward in evaluations (${set})` : 'reward in training'), runs.map((run) => ({ run: run.number, name: run.name,
    points: [...groupBy(run.rows.filter((each) => each.set === set), (each) => each.number)].map(([step, own]) => [step, mean(own.map((each) => each.reward).filter(isNumber))]) })),
  (step) => document.getElementById(`of-step-${step}`)?.scrollIntoView({ block: 'center' }))).filter(Boolean);
}

/* A line for each step: the rewards of its rollouts, each a link to it, the higher the greener. */
function makeProblemList(run, isNamed, [low, high]) {
  const chip = (each, step) => {
    const node = link(['rollout', run.number, step, each.index], format(each.reward, 3), { class: `chip${each.error === null ? '' : ' failed'}`, title: makeVisible(`${each.trajectory}: ${each.status}, said ${makeCell(each.given, 70)}`) });
    if (isNumber(each.reward) && each.reward > low) node.style.backgroundColor = paint(HUES[SAMPLED], (each.reward - low) / (high - low));
    return [node, ' '];
  };
  const row = ([step, own]) => {
    const rewards = own.map((each) => each.reward).filter(isNumber);
    return el('tr', { id: `of-step-${own[0].number}` }, el('td', {}, link(['step', run.number, step], makeVisible(nameStep(step)))), el('td', { class: 'number' }, rewards.length > 1 ? `${format(mean(rewards), 3)} ± ${format(deviation(rewards), 2)}` : format(rewards[0], 3)),
      el('td', { class: 'marks' }, own.flatMap((each) => chip(each, step))));
  };
  return el('section', {}, isNamed ? el('h2', { class: `run${run.number}` }, makeVisible(run.name)) : null, el('table', { class: 'by-step' },
    el('thead', {}, el('tr', {}, ['step', 'reward', 'rollouts'].map((text) => el('th', {}, text)))), el('tbody', {}, [...groupBy(run.rows, (each) => each.step)].map(row))));
}
