// What is known of each id of a row, as arrays, and the colours that show it.
'use strict';

const ORIGINS = ['prompt', 'sampled', 'bridge', 'tool text', 'message text', 'closing', 'image', 'given inside a turn'];
const [PROMPT, SAMPLED, BRIDGE, TOOL_TEXT, MESSAGE_TEXT, CLOSING, IMAGE, GIVEN] = ORIGINS.keys();
const LOSS_STATES = ['not in the loss', 'in the loss', 'clipped', 'corrected'];

/* Arrays of the T ids of a row; NaN or -1 where there is nothing. */
function expandRow(rollout, number) {
  const { record } = rollout;
  const row = record.rows[number];
  const length = row.token_ids.length;
  const data = {
    row, number, length,
    ids: Int32Array.from(row.token_ids),
    origin: new Uint8Array(length), node: new Int32Array(length).fill(-1), turn: new Int32Array(length).fill(-1),
    message: new Int32Array(length).fill(-1), loss: new Uint8Array(length), image: new Int32Array(length).fill(-1),
    nextTurn: new Int32Array(length).fill(-1), entropy: new Float64Array(length).fill(NaN), rank: new Float64Array(length).fill(NaN),
    sampler: new Float64Array(length).fill(NaN), trainer: new Float64Array(length).fill(NaN),
    advantage: new Float64Array(length).fill(NaN), version: new Float64Array(length).fill(NaN),
  };
  let sampled = 0;
  for (const [start, stop, version] of row.policy_versions) data.version.fill(version, start, stop);
  for (const segment of row.segments) {
    const turn = rollout.turn_of_node[segment.node] ?? -1;
    for (let n = segment.start; n < segment.stop; n += 1) {
      data.origin[n] = Math.max(PROMPT, ORIGINS.indexOf(segment.origin));
      data.node[n] = segment.node;
      if (data.origin[n] !== SAMPLED) continue;
      data.turn[n] = turn;
      if (Number.isNaN(data.version[n])) {  // no engine sampled it: it ends reasoning that was too long
        data.origin[n] = GIVEN;
        continue;
      }
      data.sampler[n] = row.rollout_logprobs[sampled] ?? NaN;
      data.trainer[n] = row.trainer_logprobs?.[sampled] ?? NaN;
      data.entropy[n] = row.entropies?.[sampled] ?? NaN;
      data.rank[n] = row.ranks?.[sampled] ?? NaN;
      sampled += 1;
    }
  }
  for (const [start, stop, index] of row.message_indices) data.message.fill(index, start, stop);
  for (const [start, stop] of row.loss) data.loss.fill(1, start, stop);
  for (const [start, stop] of row.clipped ?? []) data.loss.fill(2, start, stop);
  for (const [start, stop] of row.corrected ?? []) data.loss.fill(3, start, stop);
  for (const [start, stop, value] of row.advantages) data.advantage.fill(value, start, stop);
  row.images.forEach((image, index) => data.image.fill(index, image.start, image.stop));
  refineOrigins(record, data);
  return data;
}

/* What given ids are: text of a tool or of another message, the end of a turn that was cut, an image. */
function refineOrigins(record, data) {
  const { row } = data;
  const messages = hasOwnMessages(record, data) ? record.messages : [];
  let turn = -1;
  for (const segment of [...row.segments].reverse()) {
    if (segment.origin === 'sampled') {
      turn = data.turn[segment.start];
      continue;
    }
    data.nextTurn.fill(turn, segment.start, segment.stop);
    const closing = segment.origin === 'bridge' ? record.turns[turn]?.closing?.num_ids ?? 0 : 0;
    for (let n = segment.start; n < segment.stop; n += 1) {
      if (messages[data.message[n]]?.role === 'tool') data.origin[n] = TOOL_TEXT;
      else if (data.message[n] >= 0 && segment.origin === 'bridge') data.origin[n] = MESSAGE_TEXT;
      if (n - segment.start < closing) data.origin[n] = CLOSING;
      if (data.image[n] >= 0) data.origin[n] = IMAGE;
    }
  }
}

/* Whether the record's messages are those that the row's ids are from: of a history that was rewritten later they are not there. */
function hasOwnMessages(record, data) {
  return Boolean(data.row.messages) || !record.turns.some((turn) => turn.fork === 'rewritten_history') || data.turn.includes(record.turns.length - 1);
}

function differenceAt(data, n) {
  return data.trainer[n] - data.sampler[n];
}

/* Colours: translucent, so that they are readable on dark and on light. */
const HUES = [[122, 134, 150], [32, 150, 83], [58, 110, 220], [214, 140, 20], [150, 80, 200], [20, 160, 170], [210, 70, 120], [120, 140, 30]];

function paint([red, green, blue], strength) {
  return `rgb(${red} ${green} ${blue} / ${(0.1 + 0.65 * Math.min(1, Math.max(0, strength))).toFixed(3)})`;
}

function diverging(value, scale) {
  if (!Number.isFinite(value)) return '';
  return paint(value < 0 ? [214, 70, 50] : [40, 110, 220], Math.abs(value) / scale);
}

function findScale(data, read, smallest) {
  const sizes = [];
  for (let n = 0; n < data.length; n += 1) {
    const size = Math.abs(read(n));
    if (Number.isFinite(size)) sizes.push(size);
  }
  sizes.sort((a, b) => a - b);
  return Math.max(smallest, sizes[Math.floor(sizes.length * 0.99)] ?? 0);
}

/* Each stream: a name, what its colours mean, and the colour of an id. Streams without values are left out. */
function makeStreams(data) {
  const streams = [
    { key: 'origin', name: 'origin', legend: [...new Set(data.origin)].sort().map((n) => [ORIGINS[n], paint(HUES[n], n ? 0.6 : 0.15)]),
      color: (n) => paint(HUES[data.origin[n]], data.origin[n] ? 0.6 : 0.15) },
  ];
  if (data.sampler.some(Number.isFinite)) {
    streams.push({ key: 'logprob', name: 'rollout logprob', legend: [0, -1, -2, -4, -8].map((x) => [String(x), paint(HUES[4], -x / 8)]),
      color: (n) => (Number.isFinite(data.sampler[n]) ? paint(HUES[4], -data.sampler[n] / 8) : '') });
  }
  if (data.trainer.some(Number.isFinite)) {
    const scale = findScale(data, (n) => differenceAt(data, n), 1e-4);
    streams.push({ key: 'difference', name: 'trainer − sampler', legend: ends(scale, 'nats'),
      color: (n) => diverging(differenceAt(data, n), scale) });
  }
  if (data.entropy.some(Number.isFinite)) {
    const scale = findScale(data, (n) => data.entropy[n], 0.1);
    streams.push({ key: 'entropy', name: 'entropy', legend: shares(scale, ' nats', HUES[5]),
      color: (n) => (Number.isFinite(data.entropy[n]) ? paint(HUES[5], data.entropy[n] / scale) : '') });
  }
  if (data.rank.some(Number.isFinite)) {
    const strength = (rank) => Math.log2(rank) / 7;
    streams.push({ key: 'rank', name: 'rank', legend: [1, 2, 4, 16, 128].map((rank) => [rank < 128 ? String(rank) : '128 and more', paint(HUES[6], strength(rank))]),
      color: (n) => (data.rank[n] > 0 ? paint(HUES[6], strength(data.rank[n])) : '') });
  }
  if (data.advantage.some(Number.isFinite)) {
    const scale = findScale(data, (n) => data.advantage[n], 1e-6);
    streams.push({ key: 'advantage', name: 'advantage', legend: ends(scale, ''), color: (n) => diverging(data.advantage[n], scale) });
  }
  const versions = [...new Set(data.version)].filter(Number.isFinite).sort((a, b) => a - b);
  if (versions.length) {
    const hue = (version) => paint(HUES[1 + (versions.indexOf(version) % (HUES.length - 1))], 0.6);
    streams.push({ key: 'version', name: 'policy version', legend: versions.slice(0, 8).map((version) => [String(version), hue(version)]),
      color: (n) => (Number.isFinite(data.version[n]) ? hue(data.version[n]) : '') });
  }
  if (data.row.is_trained !== null && data.loss.some(Boolean)) streams.push(makeLossStream(data));
  return streams;
}

/* Which sampled ids the loss has, and what it does with them. */
function makeLossStream(data) {
  const hues = [HUES[0], HUES[3], HUES[6], HUES[4]];
  const names = [LOSS_STATES[0], data.row.is_trained ? LOSS_STATES[1] : 'would be in the loss; the row was not trained', 'clipped by the loss', 'masked or truncated by the correction'];
  const seen = new Set();
  for (let n = 0; n < data.length; n += 1) if (data.origin[n] === SAMPLED) seen.add(data.loss[n]);
  const known = data.row.clipped ? [] : [['what was clipped is not known', '']];
  return { key: 'loss', name: 'loss, clip, mask', legend: [...[...seen].sort().map((state) => [names[state], paint(hues[state], 0.6)]), ...known],
    color: (n) => (data.origin[n] === SAMPLED ? paint(hues[data.loss[n]], 0.6) : '') };
}

function shares(scale, unit, hue) {
  return [0, 0.25, 0.5, 1].map((share) => [`${format(share * scale, 2)}${share === 1 ? unit : ''}`, paint(hue, share)]);
}

function ends(scale, unit) {
  return [-1, -0.5, 0, 0.5, 1].map((share) => [`${format(share * scale, 2)}${Math.abs(share) === 1 && unit ? ` ${unit}` : ''}`, diverging(share * scale, scale)]);
}

/* Everything known of one id, as pairs of name and text. */
function describeToken(rollout, data, n) {
  const id = data.ids[n];
  const text = rollout.texts[id];
  const sampled = data.origin[n] === SAMPLED;
  const difference = differenceAt(data, n);
  const pairs = [['position', String(n)], ['id', String(id)], ['text', text === undefined ? 'not known' : JSON.stringify(makeVisible(text))]];
  if (text !== undefined) pairs.push(['bytes', rollout.bytes[id] ?? spellBytes(text)]);
  pairs.push(['origin', ORIGINS[data.origin[n]]], ['node', String(data.node[n])]);
  if (sampled || data.origin[n] === GIVEN) pairs.push(['turn', data.turn[n] < 0 ? 'not known' : String(data.turn[n])]);
  else if (data.nextTurn[n] >= 0) pairs.push(['turn', `prompt of ${data.nextTurn[n]}`]);
  if (data.message[n] >= 0) pairs.push(['message', String(data.message[n])]);
  if (sampled) {
    pairs.push(['sampler logprob', format(data.sampler[n], 6)]);
    if (Number.isFinite(difference)) pairs.push(['trainer logprob', format(data.trainer[n], 6)], ['difference', format(difference)], ['ratio', format(Math.exp(difference))]);
    if (Number.isFinite(data.rank[n])) pairs.push(['rank', String(data.rank[n])], ['entropy', `${format(data.entropy[n])} nats`]);
    pairs.push(['policy version', format(data.version[n])]);
    if (data.row.is_trained !== null) pairs.push(['loss', data.row.is_trained || !data.loss[n] ? LOSS_STATES[data.loss[n]] : 'would be in it, but the row was not trained']);
  }
  if (data.image[n] >= 0) {
    const image = data.row.images[data.image[n]];
    pairs.push(['image', `${image.sha256.slice(0, 8)}, id ${n - image.start + 1} of ${image.stop - image.start}`]);
  }
  if (Number.isFinite(data.advantage[n])) pairs.push(['advantage', format(data.advantage[n])]);
  return pairs;
}

/* The bytes of a text in UTF-8. */
function spellBytes(text) {
  return [...new TextEncoder().encode(text)].map((byte) => byte.toString(16).padStart(2, '0')).join(' ');
}
