// Two rollouts of one problem side by side: of two runs, or of two steps. `#pair/RUN/STEP/NUMBER[/RUN/STEP/NUMBER]`.
'use strict';

async function showPair(index, [run, step, number, ...second]) {
  const { problem } = (await getObject(`run/${run}/step/${step}`)).trajectories[number] ?? {};
  if (problem === undefined) throw new Error(`step ${step} of run ${run} has no rollout ${number}`);
  const runs = await findRunsOfProblem(index, problem);
  const all = runs.flatMap((each) => each.rows.map((row) => ({ run: each.number, name: each.name, row })));
  const find = (wanted) => all.find((each) => each.run === wanted[0] && each.row.step === wanted[1] && each.row.index === wanted[2]);
  const first = find([run, step, number]);
  const sides = [first, (second.length === 3 ? find(second) : findOther(all, first)) ?? first];
  for (const side of sides) side.rollout = await getObject(`run/${side.run}/step/${side.row.step}/rollout/${side.row.index}`).catch((error) => ({ error: error.message }));
  const numShared = countShared(sides);
  const shared = numShared ? listMessages(sides[0]).slice(0, numShared) : [];
  return el('div', { class: 'pair' }, el('h1', {}, 'Side by side ', el('span', { class: 'soft' }, link(['problem', problem], 'two rollouts of one problem'))),
    shared.map((node) => node.make()), first.row.expected === null ? null : el('p', {}, el('span', { class: 'soft' }, 'expected '), el('code', {}, makeVisible(first.row.expected))),
    el('div', { class: 'columns' }, sides.map((side, n) => makeSide(all, sides, n, numShared))));
}

/* What stands beside a rollout if nobody has chosen it: of the next run that has the problem, at this step or else the newest; or the newest of this run. */
function findOther(all, first) {
  const runs = [...new Set(all.map((each) => each.run))];
  const next = runs[(runs.indexOf(first.run) + 1) % runs.length];
  const others = all.filter((each) => each.run === next && each !== first);
  return (next === first.run ? undefined : others.find((each) => each.row.step === first.row.step)) ?? others.at(-1);
}

/* The messages of a rollout, each with its number, its turn, and what makes its element. */
function listMessages({ run, row, rollout }) {
  if (rollout.error) return [];
  const state = { run, rollout };
  return findConversation(rollout.record).map((n) => {
    const turn = rollout.turn_of_message[n];
    const place = ['rollout', run, row.step, row.index, findLastRow(rollout), ...(turn === undefined ? [] : [turn])];
    return { turn, message: rollout.record.messages[n], make: () => makeMessage(state, n, turn === undefined ? null : link(place, `ids of turn ${turn}`)) };
  });
}

/* How many messages before the first turn are the same on both sides: they are shown once. */
function countShared(sides) {
  const [own, other] = sides.map(listMessages);
  const isSame = (each, n) => each.turn === undefined && other[n]?.turn === undefined && JSON.stringify(each.message) === JSON.stringify(other[n]?.message);
  const end = own.findIndex((each, n) => !isSame(each, n));
  return end < 0 ? own.length : end;
}

/* One of the two: which it is, what it got, and what was said after the messages that both have. */
function makeSide(all, sides, n, numShared) {
  const side = sides[n];
  const { row, rollout } = side;
  const change = (event) => {
    const chosen = all[event.target.selectedIndex];
    goTo(`#${['pair', ...sides.flatMap((each, k) => { const { run, row: own } = k === n ? chosen : each; return [run, own.step, own.index]; })].join('/')}`);
  };
  const parts = Object.keys(row).filter((key) => key.startsWith('part:')).map((key) => isNumber(row[key]) && `${key.slice(5)} ${format(row[key], 3)}`);
  const facts = [`reward ${format(row.reward, 3)}`, ...parts, row.status, plural(row.num_turns, 'turn'), `${row.num_sampled} sampled`, isNumber(row.max_abs) && `mismatch ${format(row.max_abs, 2)}`, isNumber(row.wall_time_s) && `${format(row.wall_time_s, 3)} s`];
  return el('section', {}, el('h2', { class: `run${side.run}` }, makeVisible(side.name)),
    el('select', { id: `pair-${n}`, 'aria-label': n ? 'the rollout on the right' : 'the rollout on the left', change }, all.map((each) => el('option', { selected: each === side }, describeChoice(each)))),
    el('p', { class: 'soft' }, makeVisible(facts.filter(Boolean).join(' · ')), ' · ', link(['rollout', side.run, row.step, row.index], 'its ids')),
    listMarks(row).map((mark) => el('span', { class: 'mark' }, makeVisible(mark))),
    row.error ? el('p', { class: 'problem' }, makeVisible(row.error)) : null,
    rollout.error ? el('p', { class: 'problem' }, makeVisible(rollout.error)) : listMessages(side).slice(numShared).map((node) => node.make()));
}

function describeChoice({ name, row }) {
  return makeVisible(`${name}: ${nameStep(row.step)}, ${row.trajectory}, reward ${format(row.reward, 3)}`);
}
