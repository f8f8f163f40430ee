// The run view: curves over steps of one to four runs, and the steps that have rollouts.
'use strict';

const CHARTS = [
  ['Rewards', [['reward/mean', 'reward'], ['groups/kept_reward_mean', 'reward of kept groups'], ['groups/reward_std_mean', 'deviation within a group'], ['groups/num_zero_variance', 'groups without variance']]],
  ['Sampler against trainer', [['mismatch/kl', 'mismatch KL (k3), nats'], ['mismatch/max_abs', 'largest difference of logprobs, nats'], ['mismatch/proven_share', 'compared to the bit (numerics exact), share'], ['mismatch/share_off_20pct', 'share of ratios outside 0.8 to 1.2'], ['staleness/mean', 'staleness, versions'], ['staleness/max', 'largest staleness, versions']]],
  ['Rollouts', [['rollout/completion_tokens_mean', 'sampled ids of a rollout'], ['rollout/completion_tokens_max', 'sampled ids, the longest'], ['rollout/turns_mean', 'turns'], ['counters/truncations', 'truncated turns'], ['counters/forks', 'forks'], ['counters/parse_failures', 'calls that did not parse'], ['counters/tool_errors', 'calls that failed']]],
  ['Training', [['train/loss', 'loss'], ['supervised/loss', 'loss of supervised rows, nats'], ['train/entropy', 'entropy, nats'], ['train/full_entropy', 'entropy of the whole vocabulary, nats'], ['train/grad_norm', 'gradient norm'], ['train/clip_fraction', 'clipped'], ['train/corrected_fraction', 'corrected'], ['train/learning_rate', 'learning rate']]],
  ['Time', [['tokens_per_s/generation', 'sampled ids per second'], ['tokens_per_s/training', 'trained ids per second'], ['seconds/step', 'seconds of a step'], ['seconds/collect', 'seconds of sampling'], ['seconds/train', 'seconds of training'], ['seconds/publish', 'seconds of publishing'], ['idle/trainer', 'trainer idle, share'], ['idle/sampler', 'sampler idle, share']]],
];

/* What is shown of an evaluation, in this order. */
/* Sections that were opened or closed, and the step that each scrubber stands at, stay when numbers come. */
const folds = new Map();
/* How the curves of runs are drawn, and which others were asked for by name. */
let look = PLAIN;
let wanted = '';
const EVALUATED = [/^reward\/mean$/, /^pass@/, /^completion_tokens\/mean$/, /^num_cut$/];

async function showRun(index) {
  const runs = await Promise.all(index.runs.map((_, number) => getObject(`run/${number}`)));
  const shown = new Set(CHARTS.flatMap(([, charts]) => charts.map(([name]) => name)));
  const sections = CHARTS.map(([title, charts]) => makeSection(title, charts.map(([name, text]) => metricChart(runs, name, text, look))));
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics.values)))].filter((name) => !shown.has(name)).sort();
  const hasNumbers = runs.some((run) => run.metrics.steps.length);
  return el('div', {}, makeRunTable(runs), makeDiagnoses(runs), runs.length > 1 ? makeSettings(runs) : null,
    runs.map((run) => run.problems.map((problem) => el('p', { class: 'problem' }, makeVisible(`${run.name}: ${problem}`)))),
    hasNumbers || runs.every((run) => run.kind in NOUNS || run.evaluations.length) ? null : el('p', { class: 'soft' }, 'No step has ended yet: the curves begin with the first.'),
    runs.map((run) => (run.cluster ? makeCluster(run) : null)), hasNumbers || runs.some((run) => run.evaluations?.length) ? makeLookControls() : null, sections[0], makeSection('Evaluations', evaluationCharts(runs)), sections.slice(1), runs.length > 1 ? null : makeSettings(runs), makeOthers(runs, names));
}

/* What is wrong with each run, and what to do: the box on top. */
function makeDiagnoses(runs) {
  const found = runs.flatMap((run) => (run.diagnosis ?? []).map((each) => [run, each]));
  if (!found.length) return null;
  return el('section', { class: 'diagnosis' }, el('h2', {}, 'Diagnosis'), found.map(([run, each]) => el('article', {},
    el('p', { class: 'finding' }, runs.length > 1 ? el('span', { class: `run${runs.indexOf(run)}` }, makeVisible(`${run.name}: `)) : null, makeSentence(each.sentence)),
    el('p', {}, makeProse(each.advice), el('span', { class: 'soft' }, ' More: ', el('code', {}, makeVisible(each.link)))))));
}

/* A sentence as it is printed in a terminal, as one of a page: with a capital and a full stop. What it quotes stays as it is. */
function makeSentence(text) {
  return makeVisible(text).replace(/^[a-z]/, (letter) => letter.toUpperCase()).replace(/[^.!?:]$/, '$&.');
}

/* A sentence of ours, with its options and commands as code. */
function makeProse(text) {
  return makeSentence(text).split(/(`[^`]+`|(?<![\w-])--[\w.-]*\w)/).map((part, n) => (n % 2 ? el('code', { class: part.startsWith('--') ? 'option' : null }, part.replaceAll('`', '')) : part));
}

/* Charts that can be folded: on a narrow page only the first section is open. */
function makeSection(title, charts) {
  const found = charts.filter(Boolean);
  return found.length ? makeFold(title, title === CHARTS[0][0] || !isNarrow(), () => el('div', {}, layCharts(found))) : null;
}

/* Where the curves of runs are, with how they are drawn. */
function placeOfRun() {
  const query = writeLook(look);
  return query ? `run?${query}` : 'run';
}

/* Smoothing, and a logarithmic axis, for all charts of the page. */
function makeLookControls() {
  const sizes = [...new Set([1, 3, 10, 30, 100, look.smooth])].sort((a, b) => a - b);
  const change = async (part) => {
    look = { ...look, ...part };
    setHash(`#${placeOfRun()}`);
    const top = window.scrollY;
    await route();
    window.scrollTo(0, top);
  };
  return el('p', { class: 'look' }, el('label', {}, 'Curves ', el('select', { id: 'look-smooth', change: (event) => change({ smooth: sizes[event.target.selectedIndex] }) },
    sizes.map((size) => el('option', { selected: size === look.smooth }, size === 1 ? 'as they are' : `mean of ${size} values`)))),
  el('label', { class: 'flag' }, el('input', { type: 'checkbox', id: 'look-log', checked: look.isLog, change: (event) => change({ isLog: event.target.checked }) }), ' logarithmic'));
}

function makeFold(title, isOpen, make) {
  const node = el('details', { class: 'fold', open: folds.get(title) ?? isOpen }, el('summary', { id: `fold-${title.replaceAll(' ', '-')}` }, title), make());
  node.addEventListener('toggle', () => folds.set(title, node.open));
  return node;
}

/* The settings in which runs differ, or those of one. */
function makeSettings(runs) {
  const known = runs.filter((run) => run.settings && Object.keys(run.settings).length);
  if (!known.length) return null;
  if (runs.length > 1 && known.length < 2) return null;
  const show = (run, name) => { const value = run.settings[name] ?? null; return makeVisible(value === null ? '–' : typeof value === 'string' ? value : JSON.stringify(value)); };
  const all = [...new Set(known.flatMap((run) => Object.keys(run.settings)))].sort();
  const names = known.length > 1 ? all.filter((name) => name !== 'output' && new Set(known.map((run) => show(run, name))).size > 1) : all;
  if (!names.length) return el('p', { class: 'soft' }, 'The runs have the same settings.');
  const title = known.length > 1 ? `${plural(names.length, 'setting')} in which the runs differ` : 'Settings';
  return makeFold(title, known.length > 1 && names.length <= 8, () => el('table', { class: 'settings' }, el('thead', {}, el('tr', {}, el('th', {}, 'setting'), known.map((run) => el('th', { class: `run${runs.indexOf(run)}` }, makeVisible(run.name))))),
    el('tbody', {}, names.map((name) => el('tr', {}, el('td', {}, el('code', {}, makeVisible(name))), known.map((run) => el('td', {}, show(run, name))))))));
}

function makeRunTable(runs) {
  return el('section', { class: 'runs' }, runs.map((run, number) => {
    const steps = run.metrics.steps;
    const facts = run.kind in NOUNS ? describeStore(run) : [run.state, plural(steps.length, 'step'), run.model && `model ${run.model}`, run.recipe];
    const recorded = run.recorded_steps;
    return el('article', {}, el('h1', {}, el('span', { class: `dot run${number}` }), makeVisible(run.name)),
      el('p', { class: 'soft' }, makeVisible(facts.filter(Boolean).join(' · '))),
      run.kind === 'tinker' ? makeTrainingRuns(run, number) : run.kind === 'store' ? el('p', { class: 'steps' }, makePageChips(run, number)) : makeRecorded(run, number, recorded));
  }));
}

/* Ways to the rollouts of a run: the table of all, its steps, and those of evaluations. */
function makeRecorded(run, number, recorded) {
  if (!recorded.length) return el('p', { class: 'steps' }, 'No rollouts were kept (--rollout-log.groups 0), or none yet.');
  const sets = [...new Set(recorded.filter((step) => !isNumber(step)).map((step) => decodeURIComponent(step.split('@')[1])))];
  return [el('p', {}, link(['table', `${number}?`], 'all rollouts'), sets.map((set) => [' · ', link(['table', `${number}?set=${encodeURIComponent(set)}`], makeVisible(`evaluation ${set === 'evaluation' ? '' : set}`.trim()))])),
    makeScrubber(number, run, undefined)];
}

function metricChart(runs, name, text, drawn) {
  const series = runs.map((run, number) => ({ run: number, name: run.name,
    points: run.metrics.steps.map((step, n) => [step, run.metrics.values[name]?.[n] ?? null]) }));
  return makeChart(text, series, (step) => openNearest(runs, step), { code: name, look: drawn });
}

/* Show the recorded step that is nearest to where a chart was clicked. */
function openNearest(runs, step) {
  const number = runs.findIndex((run) => !(run.kind in NOUNS) && run.recorded_steps.some(isNumber));
  if (number < 0) return;
  const nearest = runs[number].recorded_steps.filter(isNumber).reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best));
  goTo(`#step/${number}/${nearest}`);
}

function evaluationCharts(runs) {
  const keys = new Map();
  const order = ({ 1: name }) => EVALUATED.findIndex((pattern) => pattern.test(name));
  for (const run of runs) {
    for (const line of run.evaluations) {
      for (const [name, value] of Object.entries(line)) {
        if (isNumber(value) && EVALUATED.some((pattern) => pattern.test(name))) keys.set(`${line.set} ${name}`, [line.set, name]);
      }
    }
  }
  const sorted = [...keys.values()].sort((a, b) => a[0].localeCompare(b[0]) || order(a) - order(b));
  return sorted.map(([set, name]) => makeChart(makeVisible(`${set}: ${name}`), runs.map((run, number) => ({ run: number, name: run.name,
    points: run.evaluations.filter((line) => line.set === set).map((line) => [line.step, line[name] ?? null]).sort((a, b) => a[0] - b[0]) })), null, { look }));
}

/* All other metrics, drawn when they are asked for. */
function makeOthers(runs, names) {
  if (!names.length) return null;
  const charts = el('div', {});
  const draw = () => {
    wanted = filter.value;
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    charts.replaceChildren(...layCharts(found.map((name) => metricChart(runs, name, '', look))).filter(Boolean));
  };
  const filter = el('input', { type: 'search', placeholder: 'name contains', 'aria-label': 'filter metrics by name', value: wanted, input: draw });
  const details = el('details', { class: 'metrics', open: folds.get('others') }, el('summary', {}, `All other metrics (${names.length})`), filter, charts);
  details.addEventListener('toggle', () => { folds.set('others', details.open); if (details.open && !charts.children.length) draw(); });
  return el('section', {}, details);
}
