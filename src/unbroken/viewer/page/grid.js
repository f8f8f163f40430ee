// A grid of ids, of which only the visible lines are in the page: lines have one height, and cells a known width.
'use strict';

const LINE_PX = 26;
const CELL_PX = 6;
const GUTTER = 7;
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|[\u{1f000}-\u{1faff}]|[\u{20000}-\u{3fffd}]/u;

/* The text of a cell: line ends and blanks can be seen. */
function cellText(text, id) {
  if (text === undefined) return `#${id}`;
  if (text === '') return '∅';
  const shown = makeVisible(text).replaceAll('\n', '↵').replaceAll('\t', '⇥');
  return shown.trim() === '' ? shown.replaceAll(' ', '␣') : shown;
}

function textWidth(text) {
  let width = 0;
  for (const character of text) width += WIDE.test(character) ? 2 : 1;
  return width;
}

class TokenGrid {
  constructor(rollout, data, { onSelect, onHover }) {
    this.rollout = rollout;
    this.data = data;
    this.onSelect = onSelect;
    this.color = () => '';
    this.selected = -1;
    this.cells = new Map();
    for (const id of new Set(data.ids)) {
      const text = cellText(rollout.texts[id], id);
      this.cells.set(id, { text, width: textWidth(text), ends: (rollout.texts[id] ?? '').endsWith('\n') });
    }
    this.inner = el('div', { class: 'lines' });
    this.node = el('div', { class: 'grid', tabindex: 0, role: 'grid', 'aria-label': plural(data.length, 'id') }, this.inner);
    this.node.addEventListener('scroll', () => this.draw(), { passive: true });
    this.node.addEventListener('click', (event) => this.atEvent(event, (n) => this.onSelect(n)));
    this.node.addEventListener('pointerover', (event) => this.atEvent(event, onHover));
    this.node.addEventListener('pointerleave', () => onHover(-1));
    new ResizeObserver(() => this.layOut()).observe(this.node);
  }

  atEvent(event, action) {
    const n = event.target.dataset?.n;
    if (n !== undefined) action(Number(n));
  }

  /* Put the ids into lines. `starts[k]` is the first id of line k. */
  layOut() {
    const width = this.node.clientWidth;
    if (!width || width === this.width) {
      this.keepVisible();
      this.draw();
      return;
    }
    const first = this.starts ? this.starts[this.firstLine()] : 0;
    this.width = width;
    this.unit = this.measure();
    const room = width - GUTTER * this.unit - 8;
    this.most = Math.max(4, Math.floor((room - CELL_PX) / this.unit));
    const starts = [0];
    let used = 0;
    for (let n = 0; n < this.data.length; n += 1) {
      const cell = this.cells.get(this.data.ids[n]);
      const size = Math.min(cell.width, this.most) * this.unit + CELL_PX;
      if (used && used + size > room) { starts.push(n); used = 0; }
      used += size;
      if (cell.ends && n + 1 < this.data.length) { starts.push(n + 1); used = 0; }
    }
    this.starts = starts;
    this.inner.style.height = `${starts.length * LINE_PX}px`;
    this.node.style.maxHeight = `${starts.length * LINE_PX + 4}px`;
    this.node.scrollTop = this.lineOf(first) * LINE_PX;
    this.drawn = null;
    this.height = this.node.clientHeight;
    this.draw();
  }

  /* At another height, a chosen id that could be seen still can. */
  keepVisible() {
    const { scrollTop, clientHeight } = this.node;
    const top = this.selected < 0 || !this.starts ? -1 : this.lineOf(this.selected) * LINE_PX;
    const wasSeen = top >= scrollTop && top < scrollTop + (this.height ?? clientHeight);
    if (wasSeen && top + LINE_PX > scrollTop + clientHeight) this.node.scrollTop = top - clientHeight / 3;
    this.height = clientHeight;
  }

  measure() {
    const probe = el('span', { class: 'cell probe' }, '0'.repeat(100));
    this.node.append(probe);
    const unit = probe.getBoundingClientRect().width / 100;
    probe.remove();
    return unit || 8;
  }

  firstLine() {
    return Math.min(this.starts.length - 1, Math.floor(this.node.scrollTop / LINE_PX));
  }

  lineOf(n) {
    let low = 0;
    let high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= n) low = middle; else high = middle - 1;
    }
    return low;
  }

  /* Make the lines that can be seen, and drop the others. */
  draw() {
    if (!this.starts) return;
    const first = Math.max(0, this.firstLine() - 4);
    const last = Math.min(this.starts.length, first + Math.ceil(this.node.clientHeight / LINE_PX) + 9);
    if (this.drawn && this.drawn[0] === first && this.drawn[1] === last) return;
    const kept = new Map();
    for (const line of [...this.inner.children]) {
      const k = Number(line.dataset.k);
      if (this.drawn && k >= first && k < last) kept.set(k, line); else line.remove();
    }
    for (let k = first; k < last; k += 1) if (!kept.has(k)) this.inner.append(this.makeLine(k));
    this.drawn = [first, last];
  }

  makeLine(k) {
    const stop = this.starts[k + 1] ?? this.data.length;
    const line = el('div', { class: 'line', 'data-k': k }, el('span', { class: 'place' }, String(this.starts[k])));
    line.style.top = `${k * LINE_PX}px`;
    for (let n = this.starts[k]; n < stop; n += 1) line.append(this.makeCell(n));
    return line;
  }

  makeCell(n) {
    const cell = this.cells.get(this.data.ids[n]);
    const node = el('span', { class: `cell${n === this.selected ? ' selected' : ''}`, 'data-n': n }, this.data.picture?.(n) ?? cell.text);
    node.style.width = `${Math.min(cell.width, this.most) * this.unit + CELL_PX - 1}px`;
    node.style.backgroundColor = this.color(n);
    return node;
  }

  paint(color) {
    this.color = color;
    for (const node of this.inner.querySelectorAll('[data-n]')) node.style.backgroundColor = color(Number(node.dataset.n));
  }

  /* Select an id, and scroll to it if it cannot be seen. */
  select(n, { center = false } = {}) {
    this.inner.querySelector('.selected')?.classList.remove('selected');
    this.selected = n;
    if (n < 0 || !this.starts) return;
    const top = this.lineOf(n) * LINE_PX;
    const { scrollTop, clientHeight } = this.node;
    if (center || top < scrollTop || top + LINE_PX > scrollTop + clientHeight) this.node.scrollTop = top - clientHeight / 3;
    this.draw();
    this.inner.querySelector(`[data-n="${n}"]`)?.classList.add('selected');
  }
}
