// What people note of a rollout: labels and a text, which the server adds to RUN/notes.jsonl.
'use strict';

/* The note of a rollout, and the form that changes it; a store and an export have none. */
function makeNote(state) {
  if (state.rollout.kind === 'tinker' || state.rollout.session) return null;
  const node = el('details', { class: 'noted' });
  drawNote(state, node);
  return node;
}

function drawNote(state, node, said = '') {
  const { labels = [], note = '', note_refusal: refusal } = state.rollout;
  const marks = labels.flatMap((label) => [el('span', { class: 'mark' }, makeVisible(label)), ' ']);
  const summary = el('summary', {}, labels.length || note ? [marks, el('span', {}, makeStart(note || ' ', 120))] : 'Note and labels');
  const why = isExport ? 'Notes are made where `unbroken view RUN` serves this page.' : refusal;
  const isWhole = note.length > 120 || note.includes('\n') || why;
  node.replaceChildren(summary, ...(why ? [isWhole && note ? el('pre', {}, makeVisible(note)) : '', el('p', { class: 'soft' }, makeProse(why))] : [makeNoteForm(state, node, said)]));
}

function makeNoteForm(state, node, said) {
  const { labels = [], note = '' } = state.rollout;
  const names = el('input', { type: 'text', id: 'note-labels', size: 30, placeholder: 'wrong tool, good', 'aria-label': 'labels, with commas between them', value: labels.join(', ') });
  const text = el('textarea', { id: 'note-text', rows: 3, 'aria-label': 'note', placeholder: 'what is to be seen here' }, note);
  const status = el('span', { class: 'soft', 'aria-live': 'polite' }, said);
  const save = async (event) => {
    event.preventDefault();
    const list = [...new Set(names.value.split(',').map((each) => each.trim()).filter(Boolean))];
    try {
      await saveNote(state, list, text.value.trim());
      drawNote(state, node, 'saved');
    } catch (error) {
      status.replaceChildren(makeVisible(error.message));
    }
  };
  return el('form', { submit: save }, el('label', {}, 'labels ', names), text, el('p', {}, el('button', { type: 'submit' }, 'save'), ' ', status));
}

/* Sends which rollout and which note are shown here: the server refuses if others are there by now. */
async function saveNote({ run, step, number, rollout }, labels, text) {
  const path = `run/${run}/step/${step}`;
  const response = await fetch(`api/${path}/rollout/${number}/note`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ labels, text, sha256: rollout.sha256, shown_time_s: rollout.note_time_s }) });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error || `it was not saved: ${response.status}`);
  Object.assign(rollout, answer);
  for (const each of [path, `${path}/rollout/${number}`]) objects.delete(each);
}
