// LaTeX as MathML, which browsers draw themselves. What is not known here is shown as it was written: makeMath never throws.
'use strict';

const MAX_MATH = 5000;
const MAX_MATH_DEPTH = 40;
const MAX_PRIMES = 8;
const TABLE_OF_SYMBOLS = `alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ
  sigma σ tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇
  emptyset ∅ varnothing ∅ ell ℓ hbar ℏ Re ℜ Im ℑ aleph ℵ angle ∠ triangle △ degree ° prime ′ dots … ldots … cdots ⋯ vdots ⋮ ddots ⋱ forall ∀ exists ∃ neg ¬ top ⊤ bot ⊥`;
const TABLE_OF_OPERATORS = `times × cdot ⋅ div ÷ pm ± mp ∓ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆
  supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖ to → rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ iff ⟺ mapsto ↦ land ∧ wedge ∧ lor ∨ vee ∨
  mid ∣ parallel ∥ perp ⊥ circ ∘ ast ∗ star ⋆ bullet ∙ oplus ⊕ otimes ⊗ therefore ∴ because ∵ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lbrace { rbrace } vert | Vert ‖ colon :`;
const TABLE_OF_LARGE = 'sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ int ∫ iint ∬ oint ∮ lim lim max max min min sup sup inf inf limsup limsup liminf liminf argmax argmax argmin argmin';
const FUNCTIONS = new Set('sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp gcd lcm det dim deg arg ker Pr'.split(' '));
const BESIDE = new Set(['int', 'iint', 'oint']);
const ACCENTS = new Map(Object.entries({ hat: '^', widehat: '^', bar: '¯', overline: '¯', vec: '→', dot: '˙', ddot: '¨', tilde: '~', widetilde: '~' }));
const SPACES = new Map(Object.entries({ ',': 0.17, ':': 0.22, ';': 0.28, ' ': 0.25, '!': 0, quad: 1, qquad: 2 }));
const SKIPPED = new Set(['displaystyle', 'textstyle', 'limits', 'nolimits', 'nonumber', 'big', 'Big', 'bigg', 'Bigg', 'bigl', 'bigr', 'Bigl', 'Bigr']);
const DOUBLE = new Map(Object.entries({ R: 'ℝ', N: 'ℕ', Z: 'ℤ', Q: 'ℚ', C: 'ℂ', P: 'ℙ', H: 'ℍ' }));
const FENCES = new Map(Object.entries({ matrix: ['', ''], pmatrix: ['(', ')'], bmatrix: ['[', ']'], Bmatrix: ['{', '}'], vmatrix: ['|', '|'], cases: ['{', ''], array: ['', ''],
  aligned: ['', ''], align: ['', ''], 'align*': ['', ''], gathered: ['', ''], equation: ['', ''], 'equation*': ['', ''], split: ['', ''] }));
const [SYMBOLS, OPERATORS, LARGE] = [TABLE_OF_SYMBOLS, TABLE_OF_OPERATORS, TABLE_OF_LARGE].map(readPairs);

function readPairs(table) {
  const words = table.split(/\s+/);
  return new Map(Array.from({ length: words.length / 2 }, (_, n) => [words[2 * n], words[2 * n + 1]]));
}

function mathml(tag, properties, ...children) {
  return fill(document.createElementNS('http://www.w3.org/1998/Math/MathML', tag), properties, children);
}

/* A formula; one with a command that is not known is its own source. `display`: on a line of its own. */
function makeMath(source, display) {
  try {
    const parser = new MathParser(source);
    const row = mathml('mrow', {}, parser.readRow());
    if (parser.token !== undefined) throw new Error('it ends too early');
    return mathml('math', { display: display ? 'block' : 'inline', title: makeVisible(source) }, row);
  } catch {
    return el('code', { class: `tex${display ? ' display' : ''}` }, makeVisible(source));
  }
}

/* Reads tokens from the left to the right: a command, a number, or one character. */
class MathParser {
  constructor(source) {
    if (source.length > MAX_MATH) throw new Error('it is too long');
    this.tokens = source.match(/\\[a-zA-Z]+\*?|\\[^]|\d+(?:[.,]\d+)*|[^\s]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
    // The spaces of \text{...}: where each token stands.
    this.source = source;
  }

  get token() {
    return this.tokens[this.at];
  }

  take(wanted) {
    const token = this.tokens[this.at];
    if (token === undefined || (wanted !== undefined && token !== wanted)) throw new Error(`${wanted ?? 'something'} is missing`);
    this.at += 1;
    return token;
  }

  /* All until one of the ends, which is not taken. */
  readRow(...ends) {
    if ((this.depth += 1) > MAX_MATH_DEPTH) throw new Error('it is too deep');
    const nodes = [];
    while (this.token !== undefined && this.token !== '}' && this.token !== '\\right' && this.token !== '\\end' && !ends.includes(this.token)) nodes.push(this.readScripts());
    this.depth -= 1;
    return nodes;
  }

  /* What is in braces, or one atom. */
  readGroup() {
    if (this.token !== '{') return this.readAtom();
    this.take('{');
    const row = mathml('mrow', {}, this.readRow());
    this.take('}');
    return row;
  }

  /* What a command has around it: \hat\hat x is as deep as \hat{\hat{x}}. */
  readArgument() {
    if ((this.depth += 1) > MAX_MATH_DEPTH) throw new Error('it is too deep');
    const node = this.readGroup();
    this.depth -= 1;
    return node;
  }

  /* An atom with what stands below and above it. */
  readScripts() {
    const name = this.token.slice(1);
    const base = '^_'.includes(this.token) ? mathml('mrow', {}) : this.readAtom();
    let [low, high, primes] = [null, null, 0];
    for (;;) {
      if (this.token === '_' && !low) { this.take(); low = this.readArgument(); }
      else if (this.token === '^' && !high) { this.take(); high = this.readArgument(); }
      else if (this.token === "'") { this.take(); primes += 1; }
      else if (SKIPPED.has(this.token?.slice(1)) && this.token.startsWith('\\')) this.take();
      else break;
    }
    if (this.token === '^' || this.token === '_') throw new Error('two of the same script');
    if (primes > MAX_PRIMES) throw new Error('it has too many primes');
    if (primes) high = mathml('mrow', {}, mathml('mo', {}, '′'.repeat(primes)), high ?? []);
    if (!low && !high) return base;
    const [under, over, both] = LARGE.has(name) && !BESIDE.has(name) ? ['munder', 'mover', 'munderover'] : ['msub', 'msup', 'msubsup'];
    return low && high ? mathml(both, {}, base, low, high) : low ? mathml(under, {}, base, low) : mathml(over, {}, base, high);
  }

  readAtom() {
    const token = this.take();
    if (token === '{') { this.at -= 1; return this.readGroup(); }
    if (token.startsWith('\\')) return this.readCommand(token.slice(1));
    if (/^\d/.test(token)) return mathml('mn', {}, token);
    if (/^\p{L}$/u.test(token)) return mathml('mi', {}, token);
    if ('&#%~$'.includes(token)) throw new Error(`${token} has no place here`);
    return mathml('mo', {}, makeVisible(token === '-' ? '−' : token));
  }

  readCommand(name) {
    if (SYMBOLS.has(name)) return mathml('mi', {}, SYMBOLS.get(name));
    if (OPERATORS.has(name)) return mathml('mo', {}, OPERATORS.get(name));
    if (LARGE.has(name)) return mathml('mo', { movablelimits: 'true' }, LARGE.get(name));
    if (FUNCTIONS.has(name)) return mathml('mi', {}, name);
    if (SPACES.has(name)) return mathml('mspace', { width: `${SPACES.get(name)}em` });
    if (SKIPPED.has(name)) return mathml('mrow', {});
    if (/^[{}$%&#_|]$/.test(name)) return mathml('mo', {}, name === '|' ? '‖' : name);
    if (ACCENTS.has(name)) return mathml('mover', { accent: 'true' }, this.readArgument(), mathml('mo', {}, ACCENTS.get(name)));
    const read = { frac: 'readFraction', dfrac: 'readFraction', tfrac: 'readFraction', binom: 'readBinomial', sqrt: 'readRoot', left: 'readFence', begin: 'readTable', text: 'readText', textbf: 'readText',
      textit: 'readText', mathrm: 'readText', operatorname: 'readText', mathbf: 'readBold', boldsymbol: 'readBold', mathbb: 'readDouble', mathcal: 'readArgument', mathit: 'readArgument', boxed: 'readBox', underline: 'readArgument', pmod: 'readModulus' }[name];
    if (!read) throw new Error(`\\${name} is not known`);
    return this[read]();
  }

  readFraction() {
    return mathml('mfrac', {}, this.readArgument(), this.readArgument());
  }

  readBinomial() {
    return mathml('mrow', {}, mathml('mo', {}, '('), mathml('mfrac', { linethickness: '0' }, this.readArgument(), this.readArgument()), mathml('mo', {}, ')'));
  }

  readRoot() {
    if (this.token !== '[') return mathml('msqrt', {}, this.readArgument());
    this.take('[');
    const index = mathml('mrow', {}, this.readRow(']'));
    this.take(']');
    return mathml('mroot', {}, this.readArgument(), index);
  }

  readFence() {
    const open = this.readDelimiter();
    const inner = this.readRow();
    this.take('\\right');
    return mathml('mrow', {}, open, inner, this.readDelimiter());
  }

  readDelimiter() {
    const token = this.take();
    const text = token.startsWith('\\') ? OPERATORS.get(token.slice(1)) ?? { '\\{': '{', '\\}': '}', '\\|': '‖' }[token] : token;
    if (text === undefined) throw new Error(`${token} is no delimiter`);
    return text === '.' ? mathml('mrow', {}) : mathml('mo', { stretchy: 'true' }, makeVisible(text));
  }

  /* The text in braces, with its spaces: tokens have none, so it is looked up in the source. */
  readText() {
    const before = this.tokens.slice(0, this.at).reduce((place, token) => this.source.indexOf(token, place) + token.length, 0);
    this.take('{');
    const open = this.source.indexOf('{', before);
    const close = this.source.indexOf('}', open);
    while (this.token !== '}') if (this.take() === '{') throw new Error('braces in a text');
    this.take('}');
    return mathml('mtext', {}, makeVisible(this.source.slice(open + 1, close).replace(/^ | $/g, '\u00a0')));
  }

  readBold() {
    return mathml('mrow', { class: 'bold' }, this.readArgument());
  }

  readDouble() {
    this.take('{');
    const letter = this.take();
    this.take('}');
    return mathml('mi', {}, makeVisible(DOUBLE.get(letter) ?? letter));
  }

  readBox() {
    return mathml('mrow', { class: 'boxed' }, this.readArgument());
  }

  readModulus() {
    return mathml('mrow', {}, mathml('mo', {}, '('), mathml('mi', {}, 'mod'), mathml('mspace', { width: '0.3em' }), this.readArgument(), mathml('mo', {}, ')'));
  }

  readName() {
    this.take('{');
    let name = '';
    while (this.token !== '}') name += this.take();
    this.take('}');
    return name;
  }

  /* \begin{NAME} ... \end{NAME}: cells between &, lines between \\. */
  readTable() {
    const name = this.readName();
    const fences = FENCES.get(name);
    if (!fences) throw new Error(`${name} is not known`);
    if (name === 'array' && !/^[lcr|]*$/.test(this.readName())) throw new Error('its columns are not known');
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(mathml('mtd', {}, this.readRow('&', '\\\\')));
      const token = this.take();
      if (token === '\\\\') rows.push([]);
      else if (token !== '&') break;
    }
    if (this.readName() !== name) throw new Error(`${name} does not end`);
    const table = mathml('mtable', { class: name.startsWith('align') || name === 'split' ? 'aligned' : name === 'cases' ? 'cases' : null }, rows.map((cells) => mathml('mtr', {}, cells)));
    return mathml('mrow', {}, fences.map((fence, n) => [n ? table : null, fence ? mathml('mo', { stretchy: 'true' }, fence) : null]));
  }
}
