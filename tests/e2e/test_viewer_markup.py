"""Markdown and LaTeX of messages in a browser: elements of ours around their text, which is never HTML."""

from __future__ import annotations

import json
from random import Random

import pytest

from support.browser import CHROMIUM, Browser
from support.recorded import make_row, make_trajectory, write_step
from unbroken.cli import main

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
HOSTILE = "<script>hacked()</script></script><img src=x onerror=hacked()> \\u202eright to left"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """The URL of an export of a rollout whose messages have markup."""
    folder = tmp_path_factory.mktemp("markup")
    content = f"**Sum**: $1+1$ {HOSTILE}".replace("\\u202e", "\u202e")
    answer = {"role": "assistant", "content": content, "reasoning_content": "I *add*."}
    messages = [{"role": "user", "content": "plain"}, answer, {"role": "tool", "content": "**raw**"}]
    write_step(folder / "run", 0, [make_trajectory("g0/0", [make_row([1, 2, 3], num_prompt=1)], messages=messages)])
    assert main(["view", str(folder / "run"), "--export", str(folder / "page")]) == 0
    return f"{(folder / 'page/index.html').as_uri()}#rollout/0/0/0"


def read(browser: Browser, selector: str) -> str:
    return " ".join(browser.run(f"document.querySelector({selector!r}).innerText").split())


def count(browser: Browser, selector: str) -> int:
    return browser.run(f"document.querySelectorAll({selector!r}).length")


def test_a_message_has_its_markup_and_what_was_sampled_is_a_click_away(browser, page):
    browser.open(page)
    assert count(browser, ".toggle") == 1
    assert count(browser, ".message.assistant :is(strong, em, math)") == 3
    assert f"Sum: 1 + 1 {HOSTILE}" in read(browser, ".message.assistant")
    assert count(browser, "main :is(img, script)") == 0
    assert read(browser, ".message.tool pre") == "**raw**"
    browser.click(".toggle")
    assert count(browser, ".message :is(strong, em, math)") == 0
    assert f"I *add*. **Sum**: $1+1$ {HOSTILE}" in read(browser, ".message.assistant")
    browser.click(".toggle")
    assert count(browser, ".message.assistant strong") == 1


def test_an_export_has_keys_that_mean_something_to_a_script(browser, tmp_path):
    record = make_trajectory("g0/0", [make_row([1, 2, 3], num_prompt=1)], data={"columns": {"__proto__": "kept"}})
    write_step(tmp_path / "run", 0, [record])
    assert main(["view", str(tmp_path / "run"), "--export", str(tmp_path / "page")]) == 0
    browser.open(f"{(tmp_path / 'page/index.html').as_uri()}#rollout/0/0/0")
    shown = "getObject('run/0/step/0/rollout/0').then((each) => Object.keys(each.record.data.columns))"
    assert browser.run(shown) == ["__proto__"]


MARKED = """(text) => {
  const list = (node) => [...node.childNodes].map(show).join('');
  const show = (node) => node.nodeType === 3 ? node.data : `<${node.localName}>${list(node)}</${node.localName}>`;
  const node = makeMarked(text);
  return node && list(node);
}"""
"""A text's elements without their attributes, or null where there is no markup."""


def mark(browser: Browser, text: str) -> str | None:
    return browser.run(f"({MARKED})({json.dumps(text)})")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no markup\n\nin 2 * 3 * 4 and snake_case_names, $5 and $6", None),
        ("**bold** and *thin* ~~no~~", "<p><strong>bold</strong> and <em>thin</em> <del>no</del></p>"),
        ("`a *b*` \\*c\\*", "<p><code>a *b*</code> *c*</p>"),
        ("# A\n\n---\nb\n## C ", "<p>A</p><hr></hr><p>b</p><p>C</p>"),
        (
            "1. a\n2. b\n   - c\n   - d\n\n3. e",
            "<ol><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ol>",
        ),
        ("text\n- a\n  more\n- b", "<p>text</p><ul><li>a\nmore</li><li>b</li></ul>"),
        ("```py\na *b*\n<b>\n```\nafter", "<pre><span>py</span>a *b*\n<b></pre><p>after</p>"),
        ("```\nnever ends", "<pre>never ends</pre>"),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        (
            "|a|b|\n|-|-:|\n|*c*|d|e|\n|f|",
            "<table><tr><th>a</th><th>b</th></tr><tr><td><em>c</em></td><td>d</td><td>e</td></tr><tr><td>f</td></tr></table>",
        ),
        ("[a](javascript:hacked())", "<p><span>a<code>javascript:hacked()</code></span></p>"),
        ('[a](b "c <d>")', "<p><span>a<code>b</code> c <d></span></p>"),
        ("![b](http://c)", "<p><span>image b<code>http://c</code></span></p>"),
        ("<b>*a*</b><script>hacked()</script>", "<p><b><em>a</em></b><script>hacked()</script></p>"),
    ],
)
def test_markdown_becomes_elements_and_html_stays_text(browser, page, text, shown):
    browser.open(page)
    assert mark(browser, text) == shown


def row(*parts: str) -> str:
    return f"<mrow>{''.join(parts)}</mrow>"


def letter(name: str) -> str:
    return f"<mi>{name}</mi>"


def number(value: str) -> str:
    return f"<mn>{value}</mn>"


def cells(*parts: str) -> str:
    return f"<mtr>{''.join(f'<mtd>{part}</mtd>' for part in parts)}</mtr>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"$x''_1$", f"<msubsup>{letter('x')}{number('1')}{row('<mo>′′</mo>')}</msubsup>"),
        (r"$x_1^2$", f"<msubsup>{letter('x')}{number('1')}{number('2')}</msubsup>"),
        (r"\(\frac{a}{2} \le \pi\)", f"<mfrac>{row(letter('a'))}{row(number('2'))}</mfrac><mo>≤</mo>{letter('π')}"),
        (r"$\sqrt[3]{x}$", f"<mroot>{row(letter('x'))}{row(number('3'))}</mroot>"),
        (r"$$\sum_{i}^{n}$$", f"<munderover><mo>∑</mo>{row(letter('i'))}{row(letter('n'))}</munderover>"),
        (r"$\text{two words} \text{b}$", "<mtext>two words</mtext><mtext>b</mtext>"),
        (r"so \boxed{1,000}", row(row(number("1,000")))),
        ("\\[\n\\left( x \\right]\n\\]", row("<mo>(</mo>", letter("x"), "<mo>]</mo>")),
        (
            "\\begin{cases} 1 & a \\\\ 2 & b \\end{cases}",
            row(
                f"<mo>{{</mo><mtable>{cells(number('1'), letter('a'))}{cells(number('2'), letter('b'))}</mtable>",
            ),
        ),
    ],
)
def test_latex_is_drawn_as_formulas(browser, page, text, shown):
    browser.open(page)
    assert f"<math>{row(shown)}</math>" in str(mark(browser, text))


@pytest.mark.parametrize(
    "source",
    [
        *(r"\unknown{1}", r"\frac{1}", "x^", "{" * 9000, "{" * 60 + "}" * 60, "a}", r"\left( a", r"\begin{cases} a"),
        *(
            r"\constructor",
            "x^1^2",
            r"\href{javascript:hacked()}{a}",
            r"\begin{array}{say} 1 \end{array}",
            "x" + "'" * 9,
        ),
        *(r"\hat" * 60 + "x", r"\sqrt" * 60 + "x", "x^" * 60 + "x", r"\frac" * 60 + "x" * 61),
    ],
)
def test_a_formula_that_is_not_known_is_its_own_source(browser, page, source):
    browser.open(page)
    node = f"makeMath({json.dumps(source)}, true)"
    assert browser.run(f"[{node}.localName, {node}.textContent]") == ["code", source]


def test_no_formula_takes_the_page_a_long_time_to_lay_out(browser, page):
    browser.open(page)
    parts = [("{", "}"), (r"\hat", ""), (r"\sqrt{", "}"), ("x^{", "}"), (r"\frac{1}{", "}"), (r"\left(", r"\right)")]
    sources = [f"{start * depth}x{end * depth}" for start, end in parts for depth in (12, 19, 38, 300)]
    sources += ["x" + "'" * 800, "x'" * 800, r"\boxed{" * 38 + "x" + "}" * 38, r"\hat x" * 800]
    spent = browser.measure(
        f"{json.dumps(sources)}.forEach((each) => {{ const node = makeMath(each, true); document.body.append(node); "
        "node.getBoundingClientRect(); node.remove(); })"
    )
    assert spent < 20


def test_a_table_has_only_the_cells_that_were_written_and_a_huge_one_ends(browser, page):
    browser.open(page)
    header, divider = "a|" * 99 + "a", "-|" * 99 + "-"
    narrow = "\n".join([header, divider, *["b|c"] * 1000])
    assert browser.run(f"makeMarked({json.dumps(narrow)}).querySelectorAll('td').length") == 2000
    assert mark(browser, f"a|{header}\n-|{divider}") is None
    tall = "\n".join(["a|b", "-|-", *["b|c"] * 12_000])
    node = f"makeMarked({json.dumps(tall)})"
    assert browser.run(f"{node}.querySelectorAll('td').length") == 19_998
    assert browser.run(f"{node}.textContent.replace(/[^c]/g, '').length") == 12_000


def test_a_text_is_marked_once(browser, page):
    browser.open(page)
    script = "let n = 0; const own = readTable; readTable = (...all) => { n += 1; return own(...all); };"
    message = json.dumps({"role": "assistant", "content": "a|b\n-|-\nc|d"})
    state = f"{{ rollout: {{ record: {{ messages: [{message}] }} }} }}"
    drawn = f"const node = makeMessage({state}, 0, null); [n, node.querySelectorAll('table, .toggle').length]"
    assert browser.run(f"{{ {script} {drawn} }}") == [1, 2]


def test_the_items_of_a_list_have_the_numbers_that_were_written(browser, page):
    browser.open(page)
    items = "makeMarked('7. a\\n3) b\\n\\n3. c').querySelectorAll('li')"
    assert browser.run(f"[...{items}].map((each) => each.value)") == [7, 3, 3]


def test_no_letter_is_lost_between_marks(browser, page):
    browser.open(page)
    pieces = [*"abcd", " ", "\n", "\n\n", *"*_`#>|~[]()!-", "**", "```", "- ", "1. ", "  ", "|-|", "](x)", "\u202e"]
    pieces += ["|a|b|\n|-|-|\n|c|d|x|a\n", "```a b\n", '[a](b "c d")', "$x'$"]
    random = Random(7)
    texts = ["".join(random.choices(pieces, k=random.randrange(1, 60))) for _ in range(600)]
    script = """(text) => {
      const node = makeMarked(text);
      const letters = [...String(node?.textContent).replaceAll('image ', '')].filter((c) => /[abcdxu]/.test(c));
      return node && letters.sort().join('');
    }"""
    shown = browser.run(f"{json.dumps(texts)}.map({script})")
    assert sum(each is not None for each in shown) > 300
    for text, letters in zip(texts, shown, strict=True):
        written = "".join(sorted(c for c in text.replace("\u202e", "u") if c in "abcdxu"))
        assert letters in (None, written), text


def test_a_mark_that_nothing_closes_is_searched_for_once(browser, page):
    """Twice the text takes twice the looks, not four times."""
    browser.open(page)
    count = """(text) => {
      let n = 0;
      const own = String.prototype.indexOf;
      String.prototype.indexOf = function (...all) { n += 1; return own.apply(this, all); };
      try { makeMarked(text); } finally { String.prototype.indexOf = own; }
      return n;
    }"""
    for part in ("a *b c ", "_b c ", "**b ~~c "):
        looks = [browser.run(f"({count})({json.dumps(part * num)})") for num in (300, 600)]
        assert looks[1] <= 3 * looks[0], part
    boxed = "\\boxed{ " * 500 + "\\boxed{a}"
    assert mark(browser, boxed).count("<math>") == 1


def test_a_page_of_very_long_texts_is_shown_as_it_was_sampled_from_a_length_on(browser, page):
    browser.open(page)
    browser.run("forgetTexts()")
    texts = json.dumps([f"**{n}**\n\n{'x' * 49_000}" for n in range(12)])
    assert browser.run(f"{texts}.map((text) => makeMarked(text) !== null)") == [True] * 10 + [False] * 2
    assert browser.run(f"makeMarked({texts}[0]) !== null")


def test_hostile_texts_take_the_page_no_long_time(browser, page):
    browser.open(page)
    size = 49_000
    parts = ["*a ", "> ", "`", "``a", "[", "$a ", "\\boxed{", "- ", " ", "|-", "**", "_a", "#", "~", "\\", "![a]("]
    parts += ["$$\n", "\\begin{x}\n", "*a*\n\n", "[a](b(", "a|b\n-|-\n\n"]
    texts = [(part * size)[:size] + end for part in parts for end in ("", "x", "`")]
    texts += [f"# {' ' * size}x", f"```{' ' * size}`", f"a|\n{' ' * size}x-", f"-{' ' * size}- x"]
    texts += ["\n".join(" " * k + "- a" for k in range(300)), "\n".join(["a|b"] * 12_000)]
    texts += ["".join(f"{k % 9}\n" for k in range(2000)) + part * 900 for part in ("# a\n", "- a\n", "a|b\n-|-\n\n")]
    spent = browser.measure(f"{json.dumps(texts)}.forEach((text) => {{ forgetTexts(); makeMarked(text); }})")
    assert spent < 20  # nearly all take some milliseconds; what is quadratic takes minutes
