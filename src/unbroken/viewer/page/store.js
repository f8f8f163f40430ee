// What is different about a store: a step is a page of sessions, and a rollout is a session. Of a Tinker server's store a
// session is a sequence, and page 2 of training run 3 is step 3,000,002.
'use strict';

const NOUNS = { store: 'session', tinker: 'sequence' };
const MAX_PAGES = 1e6;

function isStore(index, run) {
  return index.runs[run]?.kind in NOUNS;
}

function namePage(step, size = 100) {
  const page = step % MAX_PAGES;
  return `${step < MAX_PAGES ? 'sessions' : 'sequences'} ${page * size + 1}–${(page + 1) * size}`;
}

function nameSession(step, number, size = 100) {
  return `${step < MAX_PAGES ? 'session' : 'sequence'} ${(step % MAX_PAGES) * size + number + 1}`;
}

/* What a store is, where a run has its facts. */
function describeStore(run) {
  const all = Object.values(run.sessions).reduce((sum, count) => sum + count, 0);
  const counts = Object.entries(run.sessions).map(([status, count]) => `${count} ${status}`);
  if (run.kind === 'tinker') return [`server ${run.state}`, plural(run.training_runs.length - 1, 'training run')];
  return [`gateway ${run.state}`, plural(all, 'session'), counts.length > 1 && counts.join(', '), run.model && `model ${run.model}`];
}

function makePageChips(run, number) {
  return [run.recorded_steps.length ? 'Sessions: ' : 'No session was created yet.',
    run.recorded_steps.map((step) => link(['step', number, step], namePage(step, run.page_size).replace('sessions ', ''), { class: 'chip' }))];
}

function makeStoreHead(index, run, step, numbers, summary) {
  const rewards = summary.trajectories.map((each) => each.reward).filter(isNumber);
  const facts = [...describeStore(numbers), rewards.length && `reward ${format(mean(rewards), 3)} ± ${format(deviation(rewards), 3)} of ${rewards.length}`];
  return el('section', { class: 'head' }, el('h1', {}, makeVisible(index.runs[run].name), el('span', { class: 'soft' }, ` ${namePage(step, numbers.page_size)}`)),
    el('p', {}, makeVisible(facts.filter(Boolean).join(' · '))),
    numbers.recorded_steps.length > 1 ? el('p', { class: 'steps' }, makePageChips(numbers, run)) : null);
}

/* What a session was created with, and how it ended. */
function makeSessionFacts(session) {
  const { metadata, ...settings } = session.settings;
  const shown = { metadata, settings, outcome: session.outcome };
  return el('details', { class: 'session' },
    el('summary', {}, 'training_run' in settings ? `Sampled ${formatDate(session.created_s)} UTC` : `Session ${session.status}, created ${formatDate(session.created_s)} UTC`),
    el('pre', {}, makeVisible(JSON.stringify(shown, null, 1))));
}

function formatDate(seconds) {
  return isNumber(seconds) ? new Date(seconds * 1000).toISOString().replace('T', ' ').slice(0, 19) : '–';
}

/* The training runs of a Tinker server, the newest first, and last the base model if it sampled anything. */
function makeTrainingRuns(run, number) {
  const shown = run.training_runs.filter((each) => each.model_id || each.num_sequences).reverse();
  return el('ol', { class: 'rollouts' }, shown.map((each) => el('li', {}, link(['step', number, each.pages.at(-1)], [
    el('span', { class: 'name' }, makeVisible(each.model_id || 'base model')), el('span', { class: 'soft' }, describeTrainingRun(each)),
    each.ended && el('span', { class: 'status odd' }, makeVisible(`ended ${formatDate(each.used_s)}: ${each.ended}`)),
  ]))));
}

function describeTrainingRun(each) {
  return makeVisible([each.base_model, each.model_id && (each.lora ? `LoRA of rank ${each.lora.rank}` : 'all weights'), each.model_id && `made ${formatDate(each.made_s)} UTC`,
    plural(each.num_steps, 'step'), plural(each.num_sequences, 'sequence'), plural(each.checkpoints.length, 'checkpoint')].filter(Boolean).join(' · '));
}

/* A training run: the numbers of its steps, those that were 0 in all as a line, and the pages of its sequences. */
function makeTinkerHead(index, run, step, numbers, { training_run: each, metrics }) {
  const names = Object.keys(metrics.values);
  const always = names.filter((name) => metrics.values[name].every((value) => value === 0));
  const draw = (isSpan) => names.filter((name) => name.startsWith('provenance_') === isSpan && name !== 'num_steps' && !always.includes(name)).map((name) => metricChart([{ kind: 'tinker', name: each.model_id, metrics }], name, ''));
  return el('section', { class: 'head' }, el('h1', {}, makeVisible(each.model_id || 'base model')), el('p', {}, describeTrainingRun(each)),
    each.ended && el('p', { class: 'problem' }, makeVisible(`ended ${formatDate(each.used_s)} UTC: ${each.ended}`)),
    each.checkpoints.length ? el('details', {}, el('summary', {}, 'Checkpoints'), el('pre', {}, makeVisible(each.checkpoints.join('\n')))) : null,
    makeSection('Steps', draw(false)), makeSection('Provenance of training data', draw(true)),
    always.length ? el('p', { class: 'soft' }, makeVisible(`0 in all steps: ${always.join(', ')}`)) : null,
    el('h2', {}, 'Sequences'), el('p', { class: 'steps' }, [...each.pages].reverse().map((page) => link(['step', run, page], namePage(page).replace('sequences ', ''), { class: `chip${page === step ? ' here' : ''}` }))));
}

/* The view of a store by itself: its newest sessions. */
async function showStore(index) {
  const { recorded_steps: pages } = await getObject('run/0');
  return pages.length ? showStep(index, 0, pages.at(-1)) : showRun(index);
}
