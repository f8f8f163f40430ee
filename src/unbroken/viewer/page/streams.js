// What is known of each id of a row, as arrays, and the colours that show it.
'use strict';

const ORIGINS = ['prompt', 'sampled', 'bridge'];

/* Arrays of the T ids of a row; NaN or -1 where there is nothing. */
function expandRow(rollout, number) {
  const row = rollout.record.rows[number];
  const length = row.token_ids.length;
  const data = {
    row, number, length,
    ids: Int32Array.from(row.token_ids),
    origin: new Uint8Array(length), node: new Int32Array(length).fill(-1), turn: new Int32Array(length).fill(-1),
    message: new Int32Array(length).fill(-1), loss: new Uint8Array(length), image: new Int32Array(length).fill(-1),
    sampler: new Float64Array(length).fill(NaN), trainer: new Float64Array(length).fill(NaN),
    advantage: new Float64Array(length).fill(NaN), version: new Float64Array(length).fill(NaN),
  };
  let sampled = 0;
  for (const segment of row.segments) {
    const turn = rollout.turn_of_node[segment.node] ?? -1;
    for (let n = segment.start; n < segment.stop; n += 1) {
      data.origin[n] = Math.max(0, ORIGINS.indexOf(segment.origin));
      data.node[n] = segment.node;
      if (segment.origin !== 'sampled') continue;
      data.turn[n] = turn;
      data.sampler[n] = row.rollout_logprobs[sampled] ?? NaN;
      if (row.trainer_logprobs) data.trainer[n] = row.trainer_logprobs[sampled] ?? NaN;
      sampled += 1;
    }
  }
  for (const [start, stop, index] of row.message_indices) data.message.fill(index, start, stop);
  for (const [start, stop, version] of row.policy_versions) data.version.fill(version, start, stop);
  for (const [start, stop] of row.loss) data.loss.fill(1, start, stop);
  for (const [start, stop, value] of row.advantages) data.advantage.fill(value, start, stop);
  row.images.forEach((image, index) => data.image.fill(index, image.start, image.stop));
  return data;
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
    { key: 'origin', name: 'origin', legend: ORIGINS.map((name, n) => [name, paint(HUES[n], n ? 0.6 : 0.15)]),
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
  if (data.row.is_trained === null) return streams;
  streams.push({ key: 'loss', name: 'in the loss', legend: [[data.row.is_trained ? 'in the loss' : 'would be in the loss; the row was not trained', paint(HUES[3], 0.6)]],
    color: (n) => (data.loss[n] ? paint(HUES[3], 0.6) : '') });
  return streams;
}

function ends(scale, unit) {
  return [-1, -0.5, 0, 0.5, 1].map((share) => [`${format(share * scale, 2)}${Math.abs(share) === 1 && unit ? ` ${unit}` : ''}`, diverging(share * scale, scale)]);
}

/* Everything known of one id, as pairs of name and text. */
function describeToken(rollout, data, n) {
  const id = data.ids[n];
  const text = rollout.texts[id];
  const sampled = data.origin[n] === 1;
  const difference = differenceAt(data, n);
  const pairs = [['position', String(n)], ['id', String(id)], ['text', text === undefined ? 'not known' : JSON.stringify(makeVisible(text))]];
  if (rollout.bytes[id]) pairs.push(['bytes', rollout.bytes[id]]);
  pairs.push(['origin', ORIGINS[data.origin[n]]], ['node', String(data.node[n])]);
  if (sampled) pairs.push(['turn', data.turn[n] < 0 ? 'not known' : String(data.turn[n])]);
  if (data.message[n] >= 0) pairs.push(['message', String(data.message[n])]);
  if (sampled) {
    pairs.push(['sampler logprob', format(data.sampler[n], 6)]);
    if (Number.isFinite(difference)) pairs.push(['trainer logprob', format(data.trainer[n], 6)], ['difference', format(difference)], ['ratio', format(Math.exp(difference))]);
    pairs.push(['policy version', format(data.version[n])]);
    if (data.row.is_trained !== null) pairs.push(['in the loss', data.loss[n] ? (data.row.is_trained ? 'yes' : 'would be, but the row was not trained') : 'no']);
  }
  if (Number.isFinite(data.advantage[n])) pairs.push(['advantage', format(data.advantage[n])]);
  return pairs;
}
