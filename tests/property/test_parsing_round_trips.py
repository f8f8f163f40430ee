"""What a template renders of a random turn is parsed as that turn, for all templates of the corpus."""

import random
from enum import StrEnum
from typing import Any

import pytest

from support.corpus import CorpusTemplate, corpus_templates
from support.effort import num_cases
from support.format_templates import FORMAT_TEMPLATES, stop_of, tokenizer_of
from support.round_trips import PLAIN_WORDS, QUOTED_WORDS, TurnRenderer, random_calls, random_text
from unbroken.messages import Message
from unbroken.rendering.base import ParsedResponse, PartKind, ToolCallStatus

NUM_TURNS = num_cases(12, in_fuzz=200)


class Loss(StrEnum):
    """What the template's own rendering of a turn does not tell any more."""

    REASONING = "renders no reasoning"
    REASONING_WITHOUT_CALLS = "renders the reasoning of turns with calls only"
    REASONING_BESIDE_BOTH = "refuses reasoning beside content and calls"
    CALLS = "renders no calls: a model's call would be part of its content"
    SECOND_CALL = "refuses a second call, or leaves it out"
    CONTENT_BESIDE_CALLS = "leaves out the content of a turn with calls, or writes it as reasoning"
    QUOTES = "writes strings in quotes without escaping quotes, newlines and backslashes in them"
    NESTED_TYPES = "writes the values in lists and objects without their types, which the schema does not say either"
    THINK_TAGS = "cuts content at the tags of reasoning, or reads reasoning from it"
    SPACE = "writes a space beside the content, which is then part of the content's first word"
    TURN = "renders no conversation whose last turn can be found"


ALL_BUT_TEXT = (Loss.REASONING, Loss.CALLS)
GEMMA4 = (Loss.REASONING_WITHOUT_CALLS, Loss.THINK_TAGS)
LOSSES: dict[str, tuple[Loss, ...]] = {
    "cohere": ALL_BUT_TEXT,
    "deepseek_r1_distill": (*ALL_BUT_TEXT, Loss.THINK_TAGS),
    "deepseek_r1_distill_training": ALL_BUT_TEXT,
    "deepseekv3": (Loss.REASONING, Loss.THINK_TAGS),
    "diffusion_gemma": (Loss.THINK_TAGS,),
    "gemma": ALL_BUT_TEXT,
    "gemma4": GEMMA4,
    "gemma4_v2": (Loss.REASONING, Loss.THINK_TAGS),
    "gemma4_v5": (Loss.THINK_TAGS,),
    "glm4moe": (Loss.THINK_TAGS,),
    "gptoss": (Loss.SECOND_CALL, Loss.CONTENT_BESIDE_CALLS, Loss.REASONING_BESIDE_BOTH),
    "idefics3": (*ALL_BUT_TEXT, Loss.SPACE),
    "lfm2": ALL_BUT_TEXT,
    "lfm2_v2": (Loss.REASONING, Loss.THINK_TAGS),
    "lfm2_2_5": (Loss.QUOTES,),
    "lfm2_2_5_vl": (),
    "llama3": ALL_BUT_TEXT,
    "llama3_1": (Loss.REASONING, Loss.SECOND_CALL, Loss.CONTENT_BESIDE_CALLS),
    "llama3_2": (Loss.REASONING, Loss.SECOND_CALL, Loss.CONTENT_BESIDE_CALLS),
    "llava_next": (*ALL_BUT_TEXT, Loss.SPACE),
    "muse_glimmer": (Loss.CONTENT_BESIDE_CALLS,),
    "nemotron": (),
    "phi3": ALL_BUT_TEXT,
    "qwen2_5": (Loss.REASONING,),
    "qwen2_5_vl": ALL_BUT_TEXT,
    "qwen3": (Loss.THINK_TAGS,),
    "qwen3_8": (),
    "qwen3_instruct_2507": (Loss.REASONING,),
    "qwen3_vl": (Loss.REASONING,),
    "smolvlm": (*ALL_BUT_TEXT, Loss.SPACE),
    "template_basic": ALL_BUT_TEXT,
    "template_blip2": (*ALL_BUT_TEXT, Loss.SPACE),
    "template_chatml": ALL_BUT_TEXT,
    "template_deepseek_ocr": ALL_BUT_TEXT,
    "template_deepseek_vl2": (*ALL_BUT_TEXT, Loss.SPACE),
    "template_kimi_audio": (*ALL_BUT_TEXT, Loss.TURN),
    "template_minicpmv45": (Loss.THINK_TAGS,),
}
"""By the beginning of a template's file name, the longest that fits. White space around texts is lost by all."""

FORM_LOSSES: dict[str, tuple[Loss, ...]] = {
    "cohere": (Loss.REASONING,),
    "cohere2": (),
    "deepseek": (),
    "function_gemma": (Loss.REASONING,),
    "kimi_k2": (),
    "mistral": (Loss.REASONING,),
    "mistral, a call behind each": (),
    "nemotron": (),
    "apertus": (),
    "deepseek_v32": (),
    "deepseek_v4": (),
    "functionary": (Loss.REASONING,),
    "gigachat": (Loss.REASONING, Loss.SECOND_CALL),
    "gigachat3": (Loss.REASONING, Loss.SECOND_CALL),
    "functionary_v31": (Loss.REASONING,),
    "hunyuan3": (),
    "inkling": (),
    "kimi_k3": (),
    "llama4": (Loss.REASONING,),
    "minicpm5": (),
    "minimax_m2": (),
    "minimax_m3": (Loss.NESTED_TYPES,),
    "phi": (Loss.REASONING,),
    "seed": (),
    "solar": (),
    "pythonic": (Loss.REASONING, Loss.CONTENT_BESIDE_CALLS),
    "tool_code": (Loss.REASONING,),
    "olmo3": (),
    "xlam": (Loss.REASONING, Loss.CONTENT_BESIDE_CALLS),
    "granite": (Loss.REASONING,),
    "granite, a token before each": (Loss.REASONING,),
    "internlm": (Loss.REASONING,),
}


def losses_of(template: CorpusTemplate) -> tuple[Loss, ...]:
    file = template.name.partition("/")[2]
    return LOSSES[max((name for name in LOSSES if file.startswith(name)), key=len)]


def random_turn(rng: random.Random, losses: tuple[Loss, ...], control_tokens: tuple[str, ...]) -> Message:
    """A turn that loses nothing to these losses; its texts may spell control tokens."""
    pieces = [token[k:] for token in control_tokens for k in (0, 1)] + [token[:-1] for token in control_tokens]
    if Loss.THINK_TAGS in losses:
        pieces = [piece for piece in pieces if "think" not in piece and "channel" not in piece]
    quoted = rng.sample(pieces, min(3, len(pieces))) if rng.random() < 0.5 else []
    words = (*QUOTED_WORDS, *quoted)
    most_calls = 0 if Loss.CALLS in losses else 1 if Loss.SECOND_CALL in losses else 2
    num_calls = min(rng.choice((0, 1, 1, 2)), most_calls)
    turn: Message = {"role": "assistant", "content": random_text(rng, words)}
    if num_calls and (Loss.CONTENT_BESIDE_CALLS in losses or rng.random() < 0.5):
        turn["content"] = ""
    may_reason = Loss.REASONING not in losses and (num_calls > 0 or Loss.REASONING_WITHOUT_CALLS not in losses)
    if may_reason and rng.random() < 0.6:
        turn["reasoning_content"] = random_text(rng, words)
    if num_calls:
        turn["tool_calls"] = random_calls(rng, num_calls, PLAIN_WORDS if Loss.QUOTES in losses else words)
    if num_calls and Loss.NESTED_TYPES in losses:
        for call in turn["tool_calls"]:
            for key in ("tags", "where"):
                call["function"]["arguments"].pop(key, None)  # type: ignore[union-attr]
    return turn


TEMPLATES = [template for template in corpus_templates() if Loss.TURN not in losses_of(template)]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_turn_that_the_template_rendered_is_parsed_as_that_turn(template: CorpusTemplate) -> None:
    check_round_trips(TurnRenderer.of(template), losses_of(template), random.Random(template.name))


@pytest.mark.parametrize("name", FORMAT_TEMPLATES)
def test_a_turn_in_a_form_that_no_shipped_template_renders_is_parsed_as_that_turn(name: str) -> None:
    turns = TurnRenderer(tokenizer_of(name), stop=stop_of(name))
    check_round_trips(turns, FORM_LOSSES[name], random.Random(name))


def check_round_trips(turns: TurnRenderer, losses: tuple[Loss, ...], rng: random.Random) -> None:
    num_read = 0
    for _ in range(NUM_TURNS):
        turn = random_turn(rng, losses, turns.control_tokens)
        rendered = turns.render(turn)
        if rendered is None:
            continue  # the template rewrites a text that spells a control token
        num_read += 1
        parsed = turns.parse(rendered)
        case = f"rendered: {rendered.text!r}\nparsed: {parsed}"
        found = message_of(parsed, turn)
        if Loss.SPACE in losses:
            found["content"] = str(found["content"]).strip(" ")
        assert found == turn, case
        assert parsed.reasoning_complete, case
        covered = [i for part in parsed.parts for i in range(*part.span)]
        assert covered == list(range(len(rendered.completion_ids))), case
        calls = [part.span for part in parsed.parts if part.kind is PartKind.TOOL_CALL]
        assert calls == [call.span for call in parsed.tool_calls], case
    assert num_read >= NUM_TURNS * 0.7


def message_of(parsed: ParsedResponse, turn: Message) -> Message:
    """What was parsed, with the ids of the turn's calls and with the attempts that are no calls."""
    failures = [call for call in parsed.tool_calls if call.status is not ToolCallStatus.OK]
    ids = [call["id"] for call in turn.get("tool_calls", ())]
    ids += ["unasked"] * (len(parsed.tool_calls) - len(ids))
    return {**parsed.to_message(ids[: len(parsed.tool_calls)]), **({"failures": failures} if failures else {})}  # type: ignore[typeddict-unknown-key]


CALLS = [
    {"id": f"call0000{k}", "type": "function", "function": {"name": "search", "arguments": {"query": query}}}
    for k, query in enumerate(("first", "second"))
]
WITNESSES: dict[Loss, tuple[dict[str, Any], ...]] = {
    Loss.REASONING: ({"reasoning_content": "I think."},),
    Loss.REASONING_WITHOUT_CALLS: ({"reasoning_content": "I think."},),
    Loss.REASONING_BESIDE_BOTH: ({"reasoning_content": "I think.", "tool_calls": CALLS[:1]},),
    Loss.CALLS: ({"tool_calls": CALLS[:1]},),
    Loss.SECOND_CALL: ({"content": "", "tool_calls": CALLS},),
    Loss.CONTENT_BESIDE_CALLS: ({"tool_calls": CALLS[:1]},),
    Loss.QUOTES: tuple(
        {"tool_calls": [{**CALLS[0], "function": {"name": "search", "arguments": {"query": query}}}]}
        for query in ("it's", "a\\nb")
    ),
    Loss.THINK_TAGS: ({"content": "a<think>b</think>c"}, {"content": "a<|channel>b<channel|>c"}),
    Loss.SPACE: ({},),
}


@pytest.mark.parametrize(
    ("template", "loss"),
    [(template, loss) for template in TEMPLATES for loss in losses_of(template)],
    ids=lambda value: value.name.lower() if isinstance(value, Loss) else value.name,
)
def test_what_is_listed_as_lost_is_lost(template: CorpusTemplate, loss: Loss) -> None:
    turns = TurnRenderer.of(template)
    witnesses: list[Any] = [{"role": "assistant", "content": "Let me see.", **turn} for turn in WITNESSES[loss]]
    rendered = [(turn, turns.render(turn)) for turn in witnesses]
    assert any(found is None or message_of(turns.parse(found), turn) != turn for turn, found in rendered)
