// The rollout view: the conversation beside the grid of ids.
'use strict';

/* What stays from one rollout to the next. */
let streamKey = 'origin';
let isAsSampled = false;
/* What the keys act on: the view that is shown. */
let shownRollout = null;

async function showRollout(index, run, step, number, row, turn, token) {
  const [rollout, list] = await Promise.all([getObject(`run/${run}/step/${step}/rollout/${number}`), findList(run, step, number)]);
  const { rows } = rollout.record;
  const state = { index, run, step, number, rollout, ...list, row: Math.min(row ?? findLastRow(rollout), Math.max(0, rows.length - 1)) };
  shownRollout = state;
  state.panel = el('div', { class: 'inspector', 'aria-live': 'polite' });
  state.tokens = el('section', { class: 'tokens' });
  state.conversation = makeConversation(state);
  const view = el('div', { class: 'rollout' }, makeRolloutHead(state), el('div', { class: 'sides' }, state.conversation, state.tokens));
  drawTokens(state, token);
  if (turn !== undefined && token === undefined) jumpToTurn(state, turn);
  return view;
}

/* The list that was shown last, if the rollout is in it, or else its step: where it stands there, and which are next to it. */
async function findList(run, step, number) {
  const isHere = (each) => each.index === number && (each.step ?? shownList.step) === step;
  let list = shownList;
  let place = list?.run === run ? list.rows.findIndex(isHere) : -1;
  if (place < 0) {
    list = { step, rows: (await getObject(`run/${run}/step/${step}`)).trajectories, place: `#step/${run}/${step}` };
    place = list.rows.findIndex((each) => each.index === number);
  }
  if (place === list.rows.length - 1 && list.total > list.rows.length) await list.more();
  const at = (n) => list.rows[n] && [list.rows[n].step ?? list.step, list.rows[n].index];
  return { place, problem: list.rows[place]?.problem, total: list.total ?? list.rows.length, previous: at(place - 1), next: at(place + 1), list: list.place };
}

/* The branch that went on: of those of the first conversation, or that do not begin anew, the one with the latest turn. */
function findLastRow({ record, forks, turn_of_node: turns }) {
  const anew = new Set();
  for (const { row, parent_row: parent, position, reason } of forks) if (position === 0 || reason === 'new_conversation' || anew.has(parent)) anew.add(row);
  const last = record.rows.map((row, n) => ((row.messages?.length ? row.messages[0] !== 0 : anew.has(n)) ? -2 : row.segments.reduce((newest, { node }) => Math.max(newest, turns[node] ?? -1), -1)));
  return Math.max(0, last.lastIndexOf(last.reduce((a, b) => Math.max(a, b), -1)));
}

/* Which weights a rollout was sampled with, and whether a step was trained on it. */
function describeVersions({ record, policy_version: trained, session, set }) {
  if (session) return [];
  const versions = record.rows.flatMap((row) => row.policy_versions.map(([, , version]) => version)).sort((a, b) => a - b);
  const ends = [...new Set([versions[0], versions[versions.length - 1]])].filter(isNumber).join(' to ');
  const isTrained = record.rows.some((row) => row.is_trained);
  return [ends && `sampled by policy version ${ends}`, isTrained ? `trained from policy version ${trained}` : !set && 'not trained'];
}

/* The numbers of the messages of a rollout, to its newest reply; of a session with several agents those of the first. */
function findConversation({ messages, rows }) {
  const [newest] = rows.map((row) => row.messages ?? []).filter(([first]) => first === 0).sort((a, b) => b.at(-1) - a.at(-1));
  return newest ?? [...messages.keys()];
}

/* The expected answer next to the given one, and the row of the data set. */
function makeAnswers({ record, expected }) {
  const { columns, index } = record.data ?? {};
  if (!columns) return null;
  const last = findConversation(record).map((n) => record.messages[n]).findLast((message) => message.role === 'assistant');
  const given = typeof last?.content === 'string' ? last.content.trim() : JSON.stringify(last?.content ?? last?.tool_calls ?? null);
  const side = (title, text) => el('div', {}, el('h2', {}, title), el('pre', {}, makeVisible(text.length > 240 ? `… ${text.slice(-240).trimStart()}` : text)));
  return el('section', { class: 'answers' }, expected === null ? null : [side('Expected', expected), side('Given', given)],
    el('details', {}, el('summary', {}, isNumber(index) ? `Row ${index} of the data set` : 'Row of the data set'),
      el('table', { class: 'settings' }, Object.entries(columns).map(([name, value]) => el('tr', {}, el('td', {}, el('code', {}, makeVisible(name))), el('td', {}, el('pre', {}, makeVisible(typeof value === 'string' ? value : JSON.stringify(value)))))))));
}

function makeRolloutHead(state) {
  const { rollout, run, step, place, total } = state;
  const record = rollout.record;
  const parts = Object.entries(record.reward_parts ?? {}).map(([name, value]) => `${name} ${format(value, 3)}`);
  const ofSequence = record.turns.map((turn) => `${plural(turn.num_sampled, 'id')} sampled · ${turn.finish_reason}`);
  const facts = rollout.kind === 'tinker' ? [...ofSequence, record.error && record.status, rollout.model && `model ${rollout.model}`] : [(!rollout.session || isNumber(record.reward)) && `reward ${format(record.reward)}`, ...parts, record.status, plural(record.turns.length, 'turn'), ...describeVersions(rollout), rollout.session && rollout.model && `model ${rollout.model}`,
    isNumber(record.wall_time_s) && `${format(record.wall_time_s, 3)} s`];
  const go = (n, text) => (n === undefined ? el('span', { class: 'soft' }, text) : link(['rollout', run, ...n], text));
  return el('section', { class: 'head' },
    el('h1', {}, makeVisible(record.trajectory), el('span', { class: 'soft' }, ` of `, link(['step', run, step], rollout.session ? namePage(step) : makeVisible(nameStep(step))))),
    el('p', {}, makeVisible(facts.filter(Boolean).join(' · '))),
    el('nav', {}, go(state.previous, 'previous'), ` · ${place + 1} of `, el('a', { href: state.list }, String(total)), ' · ', go(state.next, 'next'), ' · ', rollout.kind === 'tinker' || rollout.session || !state.problem ? null : [link(['problem', state.problem], 'this problem at all steps'), ' · ', link(['pair', run, step, state.number], 'beside another'), ' · '],
      button('copy record', 'copy the record of this rollout as JSON', () => copyText(JSON.stringify(record)))),
    rollout.session ? makeSessionFacts(rollout.session) : null, makeAnswers(rollout), makeNote(state),
    record.error && el('pre', { class: 'problem' }, makeVisible(record.error)),
    rollout.has_texts ? null : el('p', { class: 'problem' }, makeVisible(`The tokenizer of ${rollout.model} is not on this machine: ids have no text here. Give it with --tokenizer FOLDER.`)));
}

/* The conversation. */
function makeConversation(state) {
  const { record, turn_of_message: turns } = state.rollout;
  return el('section', { class: 'conversation' },
    el('details', { class: 'known-tools' }),
    record.messages.map((_, n) => makeMessage(state, n, turns[n] === undefined ? button(`message ${n}`, 'show its ids', () => jumpToMessage(state, n)) : button(`turn ${turns[n]}`, 'show its ids', () => jumpToTurn(state, turns[n])))),
    el('p', { class: 'soft others' }),
    state.rollout.kind === 'tinker' ? null : makeTimeline(state),
    el('h2', {}, 'Turns'), makeTurns(state));
}

/* Where branches have messages and tools of their own, only those of the branch are shown. */
function showOwnMessages(state) {
  showTools(state, state.data.row.tools);
  const own = state.data.row.messages;
  if (!hasOwnMessages(state.rollout.record, state.data)) {
    state.conversation.querySelector('.others').replaceChildren('The history was rewritten after this branch. These are the messages after that; those of this branch are in its ids only.');
    return;
  }
  state.conversation.querySelector('.others').replaceChildren();
  if (!own) return;
  const nodes = [...state.conversation.querySelectorAll('.message')];
  for (const node of nodes) node.hidden = !own.includes(Number(node.dataset.message));
  const others = nodes.length - own.length;
  state.conversation.querySelector('.others').replaceChildren(others ? `${plural(others, 'message')} of other branches ${others === 1 ? 'is' : 'are'} not shown here.` : '');
}

function showTools(state, own) {
  const tools = own ?? state.rollout.record.tools ?? [];
  const node = state.conversation.querySelector('.known-tools');
  node.hidden = !tools.length;
  node.replaceChildren(el('summary', {}, plural(tools.length, 'tool')), el('pre', {}, makeVisible(JSON.stringify(tools, null, 1))));
}

/* Message `n`, with what leads to its ids. */
function makeMessage(state, n, jump) {
  const { role, content, reasoning_content: reasoning, tool_calls: calls, ...others } = state.rollout.record.messages[n];
  const known = Object.fromEntries(Object.entries(others).filter(([, value]) => value !== null && value !== undefined));
  return el('article', { class: `message ${['user', 'assistant', 'tool', 'system'].includes(role) ? role : 'other'}`, 'data-message': n },
    el('header', {}, el('b', {}, makeVisible(role)), el('span', {}, role === 'tool' ? null : makeToggle([reasoning, content]), ' ', jump)),
    reasoning ? makeText(reasoning, role, 'reasoning') : null,
    makeContent(state, role, content),
    (calls ?? []).map((call) => el('pre', { class: 'call' }, makeVisible(formatCall(call)))),
    Object.keys(known).length ? el('pre', { class: 'soft' }, makeVisible(JSON.stringify(known))) : null);
}

/* A text with its Markdown and LaTeX, or as it was sampled; what tools say is no Markdown. */
function makeText(text, role, kind = '') {
  const node = el('div', { class: `text ${kind}` });
  node.draw = () => node.replaceChildren((!isAsSampled && role !== 'tool' && makeMarked(text)) || el('pre', {}, makeVisible(text)));
  node.draw();
  return node;
}

/* The button that shows all texts as they were sampled, and back; none where that is the same. */
function makeToggle(contents) {
  const texts = contents.flat().map((part) => (typeof part === 'string' ? part : part?.text)).filter((text) => typeof text === 'string');
  if (!texts.some((text) => makeMarked(text))) return null;
  const node = button('', 'all texts as they were sampled, or with their Markdown and LaTeX', () => {
    isAsSampled = !isAsSampled;
    for (const each of document.querySelectorAll('.text, .toggle')) each.draw();
  });
  node.classList.add('toggle');
  node.draw = () => node.replaceChildren(isAsSampled ? 'formatted' : 'as sampled');
  node.draw();
  return node;
}

function formatCall(call) {
  const called = call.function ?? call;
  const given = typeof called.arguments === 'string' ? called.arguments : JSON.stringify(called.arguments);
  return `${called.name}(${given})`;
}

function makeContent(state, role, content) {
  if (content === null || content === undefined || content === '') return null;
  if (typeof content === 'string') return makeText(content, role);
  return (Array.isArray(content) ? content : [content]).map((part) => {
    if (part?.sha256 || /^(input_)?image(_url)?$/.test(part?.type)) return makeImage(state, part.sha256);
    return typeof part?.text === 'string' ? makeText(part.text, role) : el('pre', {}, makeVisible(JSON.stringify(part)));
  });
}

/* An image where it stands, with its size; its place, if its file is not there. */
function makeImage(state, sha256) {
  const isKept = /^[0-9a-f]{64}$/.test(sha256 ?? '');
  const size = findImageSize(state.rollout, sha256);
  const caption = el('figcaption', { class: 'soft' }, isKept ? size : 'image, whose file was not recorded');
  if (!isKept) return el('figure', { class: 'lost' }, caption);
  const image = el('img', { src: `images/run/${state.run}/image/${sha256}`, alt: `image ${sha256.slice(0, 8)}`, loading: 'lazy' });
  image.addEventListener('load', () => caption.replaceChildren(`${image.naturalWidth} × ${image.naturalHeight}${size}`));
  image.addEventListener('error', () => { image.remove(); caption.replaceChildren(`image ${sha256}, whose file is not there${size}`); });
  return el('figure', {}, image, caption);
}

/* The picture itself in the cell of its first id. */
function makeThumbnail({ run, data }, n) {
  const image = data.row.images[data.image[n]];
  if (image?.start !== n || !/^[0-9a-f]{64}$/.test(image.sha256)) return null;
  return el('img', { src: `images/run/${run}/image/${image.sha256}`, alt: '▨', 'data-n': n, loading: 'lazy' });
}

function findImageSize({ record }, sha256) {
  const found = record.rows.flatMap((row) => row.images).find((image) => image.sha256 === sha256);
  return found ? ` · ${plural(found.stop - found.start, 'id')}` : '';
}

function makeTurns(state) {
  const { record } = state.rollout;
  return el('ol', { class: 'turns', start: 0 }, record.turns.map((turn, n) => {
    const facts = [`${turn.num_sampled} ids`, turn.num_given && `reasoning closed by ${plural(turn.num_given, 'given id')}`, describePolicy(turn), describeControls(turn), turn.finish_reason, turn.cut_by && `cut by ${turn.cut_by}`, isNumber(turn.reward) && `reward ${format(turn.reward)}`,
      turn.bridge && 'bridged', turn.refusal && `no bridge: ${turn.refusal}`, turn.fork && `fork: ${turn.fork}`,
      turn.tolerances?.length && `matched in spite of ${turn.tolerances.join(', ')}`,
      turn.call_statuses.length && `calls: ${turn.call_statuses.join(', ')}`, turn.closing && `closed: ${turn.closing.how}`,
      turn.times && `sampled in ${format(turn.times.sampled_s - turn.times.sampling_s, 3)} s`,
      turn.times?.calls.length && turn.times.calls.map((call) => `${call.name} ${format(call.stop_s - call.start_s, 3)} s`).join(', ')];
    return el('li', {}, button(`turn ${n}`, 'show its ids', () => jumpToTurn(state, n)), ` ${makeVisible(facts.filter(Boolean).join(' · '))}`);
  }));
}

/* What changed the logits that the turn was sampled from. */
function describeControls({ controls }) {
  const named = Object.entries(controls ?? {}).map(([name, value]) => `${name} ${Array.isArray(value) ? `of ${value.length}` : value}`);
  return named.length && `under ${named.join(', ')}`;
}

/* Which weights answered. */
function describePolicy({ policy, policy_versions: spans }) {
  const versions = [...new Set((spans ?? []).map(([, , version]) => version))];
  const named = versions.length ? `version ${versions.join(', then ')}` : '';
  return [policy && `by ${policy}`, named].filter(Boolean).join(', ');
}

/* The ids. */
function drawTokens(state, token) {
  const { rollout } = state;
  if (!rollout.record.rows.length) {
    showTools(state);
    state.tokens.replaceChildren(el('p', { class: 'soft' }, 'Nothing was sampled, or no row was made of it: there are no ids.'));
    return;
  }
  state.data = expandRow(rollout, state.row);
  state.data.picture = (n) => makeThumbnail(state, n);
  state.streams = makeStreams(state.data);
  state.grid = new TokenGrid(rollout, state.data, { onSelect: (n) => selectToken(state, n), onHover: (n) => inspect(state, n) });
  state.legend = el('div', { class: 'legend' });
  state.choices = el('div', { class: 'streams', role: 'group', 'aria-label': 'colour by' });
  state.tokens.replaceChildren(...[makeBranches(state), state.choices, state.legend, state.grid.node, state.panel,
    el('p', { class: 'tools' }, `${[plural(state.data.length, 'id'), !rollout.set && { true: 'trained', false: 'not trained' }[state.data.row.is_trained]].filter(Boolean).join(', ')} `,
      button('copy ids', 'copy the ids of this row as JSON', () => copyText(JSON.stringify(state.data.row.token_ids))),
      button('copy turn', 'copy the ids of the chosen turn as JSON', () => copyText(JSON.stringify(listTurnIds(state)))),
      el('span', { class: 'soft keys' }, 'n p: next, previous rollout · j k: turns · ← →: ids · 1–8: colours · b: branch · Esc: list')),
    state.rollout.kind !== 'tinker' && makeRetokenised(state)].filter(Boolean));
  showOwnMessages(state);
  chooseStream(state, streamKey);
  if (isNumber(token)) requestAnimationFrame(() => { state.grid.layOut(); selectToken(state, Math.min(token, state.data.length - 1), { center: true }); });
  else inspect(state, -1);
}

function chooseStream(state, key) {
  const stream = state.streams.find((each) => each.key === key) ?? state.streams[0];
  streamKey = stream.key;
  state.choices.replaceChildren(...state.streams.map((each, n) => el('button', { type: 'button', class: each === stream ? 'on' : '', 'aria-pressed': String(each === stream),
    title: `key ${n + 1}`, click: () => chooseStream(state, each.key) }, each.name)));
  state.legend.replaceChildren(...stream.legend.map(([text, color]) => {
    const node = el('span', {}, text);
    node.style.backgroundColor = color;
    return node;
  }));
  state.grid.paint(stream.color);
}

function inspect(state, n) {
  const shown = n >= 0 ? n : state.grid.selected;
  state.panel.replaceChildren(...(shown < 0 ? [el('span', { class: 'soft' }, 'Point at an id, or choose one.')]
    : describeToken(state.rollout, state.data, shown).map(([name, text]) => el('span', {}, el('i', {}, name), ` ${text}`))));
}

function selectToken(state, n, options) {
  state.grid.select(n, options);
  if (options?.center && isStacked()) state.tokens.scrollIntoView();
  inspect(state, n);
  replaceHash(state, n);
  markMessage(state, n);
}

/* Mark the message that an id belongs to. */
function markMessage(state, n) {
  const { data, rollout } = state;
  const own = data.origin[n] === SAMPLED ? Object.entries(rollout.turn_of_message).find(([, turn]) => turn === data.turn[n])?.[0] : data.message[n];
  for (const node of document.querySelectorAll('.message')) node.classList.toggle('on', node.dataset.message === String(own));
}

function replaceHash(state, n) {
  const { run, step, number, row } = state;
  const turn = n >= 0 && state.data.turn[n] >= 0 ? state.data.turn[n] : '-';
  const parts = n >= 0 ? [row, turn, n] : [row];
  setHash(`#${['rollout', run, step, number, ...parts].join('/')}`);
}

/* The ids of the turn in which an id is chosen; of the first one that is sampled here, if none is. */
function listTurnIds({ data, grid }) {
  const turn = data.turn[grid.selected] ?? -1;
  const chosen = turn < 0 ? data.turn.find((each) => each >= 0) : turn;
  return [...data.ids].filter((_, n) => data.turn[n] === chosen);
}

function jumpToPosition(state, row, position) {
  if (row === state.row) selectToken(state, Math.min(position, state.data.length - 1), { center: true });
  else { state.row = row; drawTokens(state, position); }
}

/* The first id of a turn, in this branch or in the first that has it. */
function jumpToTurn(state, turn) {
  jump(state, (data) => data.turn.indexOf(turn));
}

function jumpToMessage(state, n) {
  jump(state, (data) => data.message.indexOf(n));
}

function jump(state, find) {
  const { rows } = state.rollout.record;
  const order = [state.row, ...rows.keys()].filter((row, n, all) => all.indexOf(row) === n && rows[row]);
  for (const row of order) {
    const found = find(row === state.row ? state.data : expandRow(state.rollout, row));
    if (found < 0) continue;
    if (row === state.row) selectToken(state, found, { center: true });
    else { state.row = row; drawTokens(state, found); }
    return;
  }
}

/* Keys; returns whether the key means something here. */
function pressRolloutKey(key) {
  const state = shownRollout;
  if (!state) return false;
  const { run, data } = state;
  if (key === 'n' || key === 'p') {
    const other = key === 'n' ? state.next : state.previous;
    if (other !== undefined) goTo(`#${['rollout', run, ...other].join('/')}`);
    return true;
  }
  if (key === 'Escape') {
    goTo(state.list);
    return true;
  }
  if (!data) return false;
  if (key === 'ArrowRight' || key === 'ArrowLeft') {
    const next = state.grid.selected + (key === 'ArrowRight' ? 1 : -1);
    selectToken(state, Math.min(data.length - 1, Math.max(0, next)));
    return true;
  }
  if (key === 'j' || key === 'k') {
    const turns = [...new Set(data.turn)].filter((turn) => turn >= 0);
    const here = state.grid.selected < 0 ? -1 : turns.findLastIndex((turn) => data.turn.indexOf(turn) <= state.grid.selected);
    const turn = turns[Math.min(turns.length - 1, Math.max(0, here + (key === 'j' ? 1 : -1)))];
    if (turn !== undefined) jumpToTurn(state, turn);
    return true;
  }
  if (key === 'b') {
    state.row = (state.row + 1) % state.rollout.record.rows.length;
    drawTokens(state);
    replaceHash(state, -1);
    return true;
  }
  const stream = /^[1-9]$/.test(key) ? state.streams[Number(key) - 1] : undefined;
  if (stream) chooseStream(state, stream.key);
  return stream !== undefined;
}
