"""The worked example of docs/history.md, id by id: a template and a tokenizer whose words are the numbers there."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.rollouts import play
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.tree import export_samples
from unbroken.rendering.base import HistoryPolicy
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Continue

CONTROL = ("<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>", "<|tool|>")
TEMPLATE = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {{- '<|' ~ m.role ~ '|>' -}}
  {%- if m.reasoning_content and loop.index0 > ns.last -%}
    {{- '<think>' ~ m.reasoning_content ~ '</think>' -}}
  {%- endif -%}
  {{- m.content ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def number_tokenizer() -> Any:
    words = {"other": 0, **{token: k for k, token in enumerate(CONTROL, start=1)}, **{str(k): k for k in range(7, 40)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="other"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def lines(text: str) -> list[int]:
    return [int(word) for word in text.split()]


TURNS = ("4 21 5 31 3", "4 22 5 32 3", "4 23 5 33 3")
SAMPLES = {
    HistoryPolicy.EXACT: [("1 11 3 2", "4 21 5 31 3", "1 12 3 2", "4 22 5 32 3", "6 13 3 2", "4 23 5 33 3")],
    HistoryPolicy.TEMPLATE: [
        ("1 11 3 2", "4 21 5 31 3"),
        ("1 11 3 2 31 3 1 12 3 2", "4 22 5 32 3", "6 13 3 2", "4 23 5 33 3"),
    ],
}
"""Given and sampled in turn."""
COUNTS = {
    HistoryPolicy.EXACT: {"bridges/derived": 2, "history/drops_reasoning": 1, "history/kept": 1},
    HistoryPolicy.TEMPLATE: {
        "bridges/derived": 1,
        "forks/template_rewrites": 1,
        "history/kept": 1,
        "refusals/rewrites_history": 1,
    },
}


@pytest.mark.parametrize("policy", SAMPLES)
async def test_the_samples_of_the_worked_example_are_those_of_the_page(policy: HistoryPolicy):
    answers = [
        Continue(messages=[{"role": "user", "content": "12"}]),
        Continue(messages=[{"role": "tool", "content": "13"}]),
    ]
    trajectory = await play(
        ScriptedEnv(answers, messages=[{"role": "user", "content": "11"}]),
        ScriptedEngine([lines(turn) for turn in TURNS], allow_forks=True),
        renderer=TemplateRenderer(number_tokenizer(), history=policy),
    )
    assert trajectory.error is None
    found = export_samples(trajectory.tree, 1.0)
    assert [row.token_ids.tolist() for row in found] == [lines(" ".join(pieces)) for pieces in SAMPLES[policy]]
    masks = [[k % 2 == 1 for k, piece in enumerate(pieces) for _ in lines(piece)] for pieces in SAMPLES[policy]]
    assert [row.loss_mask.tolist() for row in found] == masks
    assert [row.sampled_mask.tolist() for row in found] == masks
    assert {k: n for k, n in trajectory.counters.as_dict().items() if "status" not in k} == COUNTS[policy]
