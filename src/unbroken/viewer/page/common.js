// What all views use: elements, the text of rollouts, objects by path, numbers.
'use strict';

/* Elements. Text becomes text nodes: nothing here reads HTML. */
function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === 'function') node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function button(text, title, action) {
  return el('button', { type: 'button', title, click: action }, text);
}

/* Text of rollouts: characters that cannot be seen, or change the direction of others, are spelled out. */
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function makeVisible(text) {
  return String(text).replace(HIDDEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`);
}

/* Objects by path: from the server, or from the files of an export. */
const isExport = document.documentElement.dataset.source === 'files';
const objects = new Map();
const waiting = new Map();
const MAX_OBJECTS = 60;

function receive(path, value) {
  waiting.get(path)?.(value);
}

function getObject(path) {
  if (!objects.has(path)) {
    const promise = isExport ? loadScript(path) : loadJson(path);
    objects.set(path, promise);
    promise.catch(() => objects.delete(path));
    while (objects.size > MAX_OBJECTS) objects.delete(objects.keys().next().value);
  }
  return objects.get(path);
}

async function loadJson(path) {
  const response = await fetch(`api/${path}`);
  const value = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(value.error || `${path}: ${response.status}`);
  return value;
}

function loadScript(path) {
  return new Promise((resolve, reject) => {
    const script = el('script', { src: `data/${path.replaceAll("%", "%25")}.js` });
    const end = () => { waiting.delete(path); script.remove(); };
    waiting.set(path, (value) => { end(); resolve(value); });
    script.addEventListener('error', () => { end(); reject(new Error(`the export has no ${path}${path.includes('/rollout/') ? ': it has all lines, but not all rollouts (--max-rollouts)' : ''}`)); });
    script.addEventListener('load', () => setTimeout(() => { end(); reject(new Error(`${path} is damaged`)); }, 0));
    document.head.append(script);
  });
}

/* Numbers. */
function isNumber(value) {
  return typeof value === 'number' && Number.isFinite(value);
}

function format(value, digits = 4) {
  if (!isNumber(value)) return '–';
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(1, digits - 2)).replace(/\.?0+e/, 'e');
  return String(Number(value.toPrecision(digits)));
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function deviation(values) {
  const middle = mean(values);
  return values.length ? Math.sqrt(mean(values.map((value) => (value - middle) ** 2))) : null;
}

function plural(number, noun, several = `${noun}s`) {
  return `${number} ${number === 1 ? noun : several}`;
}

function isNarrow() {
  return matchMedia('(max-width: 40rem)').matches;
}

/* Whether the ids of a rollout are below its conversation: see the style sheet. */
function isStacked() {
  return matchMedia('(max-width: 56rem)').matches;
}

/* The hash that is shown. A view changes its own without being made anew; another view waits for the keys pressed meanwhile. */
let routed = null;

function setHash(hash) {
  history.replaceState(null, '', hash);
  routed = location.hash;
}

function goTo(hash) {
  location.hash = hash;
}

/* Links. */
function link(parts, text, properties = {}) {
  return el('a', { href: `#${parts.join('/')}`, ...properties }, text);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el('textarea', { class: 'aside' });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
}
