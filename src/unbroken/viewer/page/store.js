// What is different about a gateway's store: a step is a page of sessions, and a rollout is a session.
'use strict';

function isStore(index, run) {
  return index.runs[run]?.kind === 'store';
}

function namePage(step, size = 100) {
  return `sessions ${step * size + 1}–${(step + 1) * size}`;
}

function nameSession(step, number, size = 100) {
  return `session ${step * size + number + 1}`;
}

/* What a store is, where a run has its facts. */
function describeStore(run) {
  const all = Object.values(run.sessions).reduce((sum, count) => sum + count, 0);
  const counts = Object.entries(run.sessions).map(([status, count]) => `${count} ${status}`);
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
  const date = (seconds) => new Date(seconds * 1000).toISOString().replace('T', ' ').slice(0, 19);
  const { metadata, ...settings } = session.settings;
  const shown = { metadata, settings, outcome: session.outcome };
  return el('details', { class: 'session' },
    el('summary', {}, `Session ${session.status}, created ${date(session.created_s)} UTC`),
    el('pre', {}, makeVisible(JSON.stringify(shown, null, 1))));
}

/* The view of a store by itself: its newest sessions. */
async function showStore(index) {
  const { recorded_steps: pages } = await getObject('run/0');
  return pages.length ? showStep(index, 0, pages.at(-1)) : showRun(index);
}
