// The time-line of a rollout: when each turn was sampled, when the environment answered, and when its tools ran.
'use strict';

function makeTimeline(state) {
  const { turns, wall_time_s: wall } = state.rollout.record;
  const bars = listBars(turns);
  if (!bars.length) return turns.length ? el('p', { class: 'soft' }, 'When turns and tools ran was not recorded.') : null;
  const end = Math.max(isNumber(wall) ? wall : 0, ...bars.map((bar) => bar.stop)) || 1;
  const lanes = [...new Set(bars.map((bar) => bar.lane))].sort((a, b) => a - b);
  const names = [turns.some((turn) => turn.times) ? 'sampling' : 'turns', 'environment'];
  return el('section', { class: 'timeline' }, el('h2', {}, 'Time'),
    lanes.map((lane) => el('div', { class: 'lane' }, el('span', { class: 'soft' }, names[lane] ?? (lane === 2 ? 'tools' : '')),
      el('div', {}, bars.filter((bar) => bar.lane === lane).map((bar) => placeBar(
        el('button', { type: 'button', class: 'time', title: makeVisible(bar.title), 'aria-label': makeVisible(bar.title), click: () => jumpToTurn(state, bar.turn) }),
        bar.start / end, bar.stop / end, paint(bar.hue, bar.strength)))))),
    el('p', { class: 'soft axis' }, el('span', {}, '0 s'), el('span', {}, `${format(end / 2, 3)} s`), el('span', {}, `${format(end, 3)} s`)));
}

/* Lane 0 has what is sampled, lane 1 the environment, and the others calls: those that overlap are below each other. */
function listBars(turns) {
  const bars = [];
  turns.forEach((turn, n) => {
    const times = turn.times;
    const add = (lane, start, stop, what, hue, strength) => bars.push({ turn: n, lane, start, stop, hue, strength, title: `turn ${n}: ${what}, ${format(stop - start, 3)} s from ${format(start, 3)} s` });
    if (!times) {
      if (isNumber(turn.created_s)) add(0, turn.created_s, turn.created_s, `${turn.num_sampled} ids, answered`, HUES[1], 0.9);
      return;
    }
    add(0, times.start_s, times.sampling_s, 'its prompt', HUES[2], 0.4);
    add(0, times.sampling_s, times.sampled_s, `${turn.num_sampled} ids sampled`, HUES[1], n % 2 ? 0.65 : 0.9);
    if (isNumber(times.answered_s)) add(1, times.sampled_s, times.answered_s, 'the environment', HUES[3], n % 2 ? 0.5 : 0.7);
    const ends = [];
    for (const call of [...times.calls].sort((a, b) => a.start_s - b.start_s)) {
      const free = ends.findIndex((end) => end <= call.start_s);
      const lane = free < 0 ? ends.length : free;
      ends[lane] = call.stop_s;
      add(2 + lane, call.start_s, call.stop_s, `${call.name} (${call.status})`, call.status === 'ok' ? HUES[5] : HUES[6], 0.8);
    }
  });
  return bars;
}
