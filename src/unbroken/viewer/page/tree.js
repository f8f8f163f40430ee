// The tree of a rollout: its branches, where each leaves another, why, and the first ids that differ.
'use strict';

const NUM_CONTEXT = 3;

/* Branches in the order of the tree, each below the one that it leaves. */
function listBranches(rollout) {
  const forks = new Map(rollout.forks.map((fork) => [fork.row, fork]));
  const rows = [...rollout.record.rows.keys()];
  const follow = (row, depth) => [{ row, depth, fork: forks.get(row) }, ...rows.filter((n) => forks.get(n)?.parent_row === row).flatMap((n) => follow(n, depth + 1))];
  return rows.filter((row) => !forks.has(row)).flatMap((row) => follow(row, 0));
}

function makeBranches(state) {
  const { rollout } = state;
  if (rollout.record.rows.length < 2) return null;
  const longest = Math.max(...rollout.record.rows.map((row) => row.token_ids.length));
  const origins = { prompt: 0, sampled: 1, bridge: 2 };
  return el('div', { class: 'branches' }, listBranches(rollout).map(({ row, depth, fork }) => {
    const bar = el('div', { class: 'bar-of-branch', 'aria-hidden': 'true' }, rollout.record.rows[row].segments.map((segment) => {
      const start = Math.max(segment.start, fork?.position ?? 0);
      return start >= segment.stop ? null : placeBar(el('i', {}), start / longest, segment.stop / longest, paint(HUES[origins[segment.origin]], segment.origin === 'sampled' ? 0.75 : 0.3));
    }));
    const show = () => { state.row = row; drawTokens(state, fork?.position); if (!fork) replaceHash(state, -1); };
    const node = el('div', { class: 'branch' }, el('button', { type: 'button', class: row === state.row ? 'on' : '', title: 'show it where it leaves', click: show }, `branch ${row}`), bar,
      fork ? el('p', { class: 'fork' }, describeFork(rollout, fork)) : null);
    node.style.marginLeft = `${Math.min(depth, 6) * 0.9}rem`;
    return node;
  }));
}

/* A bar from one share of its parent's width to another. */
function placeBar(node, start, stop, color) {
  node.style.left = `${100 * start}%`;
  node.style.width = `max(2px, ${(100 * (stop - start)).toFixed(3)}%)`;
  node.style.backgroundColor = color;
  return node;
}

function describeFork(rollout, fork) {
  const { rows } = rollout.record;
  if (fork.position === 0) return `begins anew: ${makeVisible(fork.reason ?? 'a conversation of its own')}; ${plural(rows[fork.row].token_ids.length, 'id')}`;
  const spell = (row) => spellAround(rollout, rows[row].token_ids, fork.position);
  return [`leaves branch ${fork.parent_row} at ${fork.position}: ${makeVisible(fork.reason ?? 'the reason is not known')}; `,
    el('span', { class: 'spelling' }, 'there ', spell(fork.parent_row)), ' ', el('span', { class: 'spelling' }, 'here ', spell(fork.row))];
}

/* The texts of a few ids around a position, and of the one there its number. */
function spellAround(rollout, ids, position) {
  const text = (id) => cellText(rollout.texts[id], id);
  const join = (some) => some.map(text).join(rollout.has_texts ? '' : ' ');
  const before = `${join(ids.slice(Math.max(0, position - NUM_CONTEXT), position))}${rollout.has_texts ? '' : ' '}`;
  if (position >= ids.length) return el('code', {}, before, el('mark', {}, 'its end'));
  const after = `${rollout.has_texts ? '' : ' '}${join(ids.slice(position + 1, position + 1 + NUM_CONTEXT))}`;
  return [el('code', {}, before, el('mark', {}, text(ids[position])), after), ` (id ${ids[position]})`];
}
