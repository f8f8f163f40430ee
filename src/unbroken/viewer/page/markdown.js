// A part of Markdown as elements: paragraphs, headings, lists, quotes, tables, code, emphasis, and LaTeX by math.js.
// Text becomes text nodes. HTML stays text, nothing is loaded, and links and images are their text and address: none can be followed.
'use strict';

const MAX_MARKED = 50000;
const MAX_MARKED_OF_PAGE = 500000;
const MAX_PARAGRAPH = 10000;
const MAX_LEVELS = 8;
const MAX_COLUMNS = 100;
const MAX_CELLS = 20000;
/* Texts may be hostile: no expression has two parts next to each other that match the same. */
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(?=\S)/;
const DIVIDER = /^:?-+:?$/;
const LINK = /(!?)\[([^[\]\n]{0,500})\]\(((?:[^()\s]|\([^()\s]*\)){1,2000})(?:\s+"([^"\n]*)")?\)/y;
const DISPLAY = [['$$', '$$'], ['\\[', '\\]']];

/* What was made of the texts of this page, and the characters of them. */
let knownTexts = new Map();
let numMarked = 0;

/* Begin a page: nothing is known of the texts of the one before. */
function forgetTexts() {
  knownTexts = new Map();
  numMarked = 0;
}

/* The elements of a text, or null if it has no markup, or if it, or all of the page, is too long: it is shown as it was sampled then. */
function makeMarked(text) {
  if (!knownTexts.has(text)) knownTexts.set(text, markText(text));
  const node = knownTexts.get(text);
  return node?.parentNode ? node.cloneNode(true) : node;
}

function markText(text) {
  if (text.length > MAX_MARKED || numMarked + text.length > MAX_MARKED_OF_PAGE) return null;
  numMarked += text.length;
  const node = el('div', { class: 'marked' }, makeBlocks(text.split('\n'), 0));
  return node.querySelector('*:not(.para)') ? node : null;
}

/* Blocks are read by the first of these that finds one at a line; each returns what makes its element, and the line
   after it: a paragraph looks for its end with them, and makes nothing. */
function makeBlocks(lines, level) {
  if (level > MAX_LEVELS) return [el('pre', {}, makeVisible(lines.join('\n')))];
  const nodes = [];
  for (let n = 0; n < lines.length;) {
    if (!lines[n].trim()) { n += 1; continue; }
    const [make, next] = findBlock(lines, n, level) ?? readParagraph(lines, n, level);
    nodes.push(make());
    n = next;
  }
  return nodes;
}

function findBlock(lines, n, level) {
  for (const read of [readFence, readHeading, readRule, readDisplay, readQuote, readTable, readList]) {
    const found = read(lines, n, level);
    if (found) return found;
  }
  return null;
}

function readFence(lines, n) {
  const [, fence, name] = FENCE.exec(lines[n]) ?? [];
  if (!fence) return null;
  const isEnd = (line) => { const closing = line.trim(); return closing.length >= fence.length && closing === fence[0].repeat(closing.length); };
  let end = n + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  return [() => el('pre', { class: 'code' }, name.trim() ? el('span', { class: 'info' }, makeVisible(name.trim())) : null, makeVisible(lines.slice(n + 1, end).join('\n'))), end + 1];
}

function readHeading(lines, n, level) {
  const [, marks, text] = HEADING.exec(lines[n]) ?? [];
  return marks ? [() => el('p', { class: 'heading', role: 'heading', 'aria-level': marks.length }, makeInline(text.trim(), level)), n + 1] : null;
}

function readRule(lines, n) {
  return RULE.test(lines[n]) ? [() => el('hr', {}), n + 1] : null;
}

/* A formula on lines of its own; without its end it is none. */
function readDisplay(lines, n) {
  const first = lines[n].trim();
  const environment = /^\\begin\{([a-zA-Z]+\*?)\}/.exec(first)?.[1];
  const [open, close] = environment ? ['', `\\end{${environment}}`] : DISPLAY.find(([mark]) => first.startsWith(mark)) ?? [];
  if (close === undefined) return null;
  for (let end = n; end < Math.min(lines.length, n + 100); end += 1) {
    const line = end === n ? first.slice(open.length) : lines[end].trim();
    if (!line.includes(close)) continue;
    if (!line.endsWith(close) || line.indexOf(close) !== line.length - close.length) return null;
    const source = [first, ...lines.slice(n + 1, end + 1)].join('\n').trimEnd();
    return [() => makeMath(environment ? source : source.slice(open.length, -close.length).trim(), true), end + 1];
  }
  return null;
}

function readQuote(lines, n, level) {
  let end = n;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return end > n ? [() => el('blockquote', {}, makeBlocks(lines.slice(n, end).map((line) => line.replace(QUOTE, '')), level + 1)), end] : null;
}

function splitCells(line) {
  return line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());
}

function countCells(line) {
  return line.split('|').length;
}

/* A table ends before it is too large for a page; no row is filled up to the width of the first. */
function readTable(lines, n, level) {
  if (!lines[n].includes('|') || !lines[n + 1]?.includes('-') || countCells(lines[n]) > MAX_COLUMNS) return null;
  const [heads, marks] = [splitCells(lines[n]), splitCells(lines[n + 1])];
  if (heads.length !== marks.length || !marks.every((mark) => DIVIDER.test(mark))) return null;
  let end = n + 2;
  for (let cells = heads.length; end < lines.length && lines[end].includes('|') && countCells(lines[end]) <= MAX_COLUMNS; end += 1) {
    if ((cells += countCells(lines[end])) > MAX_CELLS) break;
  }
  const side = marks.map((mark) => (mark.endsWith(':') ? (mark.startsWith(':') ? 'middle' : 'right') : null));
  const row = (cells, tag) => el('tr', {}, cells.map((cell, k) => el(tag, { class: side[k] }, makeInline(cell, level))));
  return [() => el('table', { class: 'cells' }, row(heads, 'th'), lines.slice(n + 2, end).map((line) => row(splitCells(line), 'td'))), end];
}

/* Items of one kind; what is indented more than the first mark belongs to the item before. */
function readList(lines, n, level) {
  const [, indent, mark] = ITEM.exec(lines[n]) ?? [];
  if (mark === undefined) return null;
  const isOrdered = /\d/.test(mark);
  const [items, values] = [[], []];
  let end = n;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (found && found[1].length <= indent.length && /\d/.test(found[2]) === isOrdered) {
      items.push([lines[end].slice(found[0].length)]);
      values.push(isOrdered ? Number.parseInt(found[2], 10) : null);
    }
    else if (items.length && (/^\s+\S/.test(lines[end]) && lines[end].search(/\S/) > indent.length)) items.at(-1).push(lines[end]);
    else if (!lines[end].trim() && isContinued(lines, end, indent.length, isOrdered)) items.at(-1).push('');
    else break;
    end += 1;
  }
  return [() => el(isOrdered ? 'ol' : 'ul', {}, items.map((item, k) => el('li', { value: values[k] }, makeItem(item, level)))), end];
}

/* Whether a list goes on after empty lines. */
function isContinued(lines, n, indent, isOrdered) {
  const next = lines.slice(n, n + 3).find((line) => line.trim());
  const found = next === undefined ? null : ITEM.exec(next);
  return next !== undefined && (found ? found[1].length > indent || /\d/.test(found[2]) === isOrdered : next.search(/\S/) > indent);
}

function makeItem([first, ...rest], level) {
  const least = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)));
  const nodes = makeBlocks([first, ...rest.map((line) => line.slice(Number.isFinite(least) ? least : 0))], level + 1);
  return nodes.length && nodes[0].matches('.para') ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function readParagraph(lines, n, level) {
  let end = n + 1;
  while (end < lines.length && lines[end].trim() && !findBlock(lines, end, level)) end += 1;
  return [() => el('p', { class: 'para' }, makeInline(lines.slice(n, end).join('\n'), level)), end];
}

/* The text of a line or a paragraph with its emphasis, code, formulas and links. */
function makeInline(text, level) {
  if (text.length > MAX_PARAGRAPH || level > MAX_LEVELS) return [makeVisible(text)];
  const nodes = [];
  let start = 0;
  const scan = { unclosed: new Set(), braces: null };
  const special = /[\\`*_~$![]/g;
  for (let found = special.exec(text); found; found = special.exec(text)) {
    const [node, end] = readMark(text, found.index, level, scan) ?? [];
    if (end === undefined) continue;
    nodes.push(makeVisible(text.slice(start, found.index)), node);
    start = special.lastIndex = end;
  }
  return [...nodes, makeVisible(text.slice(start))];
}

/* The element that begins at a character, and where it ends; null if the character is only itself. `scan` is what is
   known of the text: marks that nothing closes from here on, and where braces end. Without it many marks take a square. */
function readMark(text, at, level, scan) {
  const mark = text[at];
  if (mark === '\\') return readBackslash(text, at, scan);
  if (mark === '`') return readCode(text, at);
  if (mark === '$') return readDollar(text, at);
  if (mark === '!' || mark === '[') return readLink(text, at);
  const isDouble = text[at + 1] === mark;
  if (mark === '~') return isDouble ? readSpan('del', '~~', text, at, level, scan) : null;
  return isDouble ? readSpan('strong', mark.repeat(2), text, at, level, scan) : readSpan('em', mark, text, at, level, scan);
}

function readSpan(tag, mark, text, at, level, scan) {
  const start = at + mark.length;
  if (scan.unclosed.has(mark) || !/\S/.test(text[start] ?? ' ') || (mark[0] === '_' && /[\p{L}\p{N}]/u.test(text[at - 1] ?? ''))) return null;
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const after = text[end + mark.length] ?? '';
    const isPart = mark.length === 1 && (after === mark || text[end - 1] === mark);
    if (isPart || /\s/.test(text[end - 1]) || (mark[0] === '_' && /[\p{L}\p{N}]/u.test(after))) continue;
    return [el(tag, {}, makeInline(text.slice(start, end), level + 1)), end + mark.length];
  }
  scan.unclosed.add(mark);
  return null;
}

function readCode(text, at) {
  const [marks] = /`+/y.exec(text.slice(at));
  const end = text.indexOf(marks, at + marks.length);
  if (end < 0 || text[end + marks.length] === '`') return null;
  return [el('code', {}, makeVisible(text.slice(at + marks.length, end).replace(/^ (.*) $/s, '$1'))), end + marks.length];
}

/* $...$ as Pandoc has it: no space inside its ends, and no digit after it, so that prices stay prices. */
function readDollar(text, at) {
  if (text[at + 1] === '$') return readFormula(text, at, '$$', '$$', true);
  for (let end = text.indexOf('$', at + 1); end >= 0; end = text.indexOf('$', end + 1)) {
    if (text[end - 1] === '\\') continue;
    const source = text.slice(at + 1, end);
    return source && !/^\s|\s$|\n\n/.test(source) && !/\d/.test(text[end + 1] ?? '') ? [makeMath(source, false), end + 1] : null;
  }
  return null;
}

function readFormula(text, at, open, close, display) {
  const end = text.indexOf(close, at + open.length);
  return end < 0 ? null : [makeMath(text.slice(at + open.length, end).trim(), display), end + close.length];
}

/* Where each brace that opens is closed. */
function findBraces(text) {
  const ends = new Map();
  const open = [];
  for (const { 0: brace, index } of text.matchAll(/[{}]/g)) {
    if (brace === '{') open.push(index);
    else if (open.length) ends.set(open.pop(), index);
  }
  return ends;
}

function readBackslash(text, at, scan) {
  if (text[at + 1] === '(') return readFormula(text, at, '\\(', '\\)', false);
  if (text[at + 1] === '[') return readFormula(text, at, '\\[', '\\]', true);
  if (text.startsWith('\\boxed{', at)) {
    scan.braces ??= findBraces(text);
    const end = scan.braces.get(at + 6);
    if (end !== undefined) return [makeMath(text.slice(at, end + 1), false), end + 1];
  }
  return /[`*_~$#>|!]/.test(text[at + 1] ?? '') ? [text[at + 1], at + 2] : null;
}

function readLink(text, at) {
  LINK.lastIndex = at;
  const [whole, isImage, name, address, title] = LINK.exec(text) ?? [];
  return whole === undefined ? null : [el('span', { class: 'address' }, isImage ? 'image ' : '', makeVisible(name), el('code', {}, makeVisible(address)), title ? ` ${makeVisible(title)}` : ''), at + whole.length];
}
