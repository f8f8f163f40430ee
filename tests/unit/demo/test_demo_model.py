import json
import random

import pytest

from unbroken.demo.config import WarmUpConfig
from unbroken.demo.lookup import JsonStyle, LookupTask, answer_text
from unbroken.demo.model import END_OF_TURN, Teacher
from unbroken.errors import InvalidInputError


class NeverGuesses(random.Random):
    def random(self):
        return 1.0


def conversation(task):
    messages = [{"role": "user", "content": task.prompt}]
    for key in task.keys:
        call = {"type": "function", "id": "x", "function": {"name": "lookup", "arguments": {"key": key}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": json.dumps(task.look_up(key))})
    return [*messages, {"role": "assistant", "content": answer_text(task.value)}]


@pytest.mark.parametrize("seed", range(20))
def test_a_canonical_demonstration_is_what_the_template_renders_text_and_ids(tokenizer, tools, seed):
    task = LookupTask.draw(random.Random(seed), JsonStyle.CANONICAL)
    pieces = Teacher(tokenizer).demonstrate(task, NeverGuesses())
    rendered = tokenizer.apply_chat_template(conversation(task), tools=tools, tokenize=False)
    assert "".join(piece.text for piece in pieces) == rendered.removesuffix("\n")
    encoded = tokenizer([piece.text for piece in pieces])["input_ids"]
    assert [i for ids in encoded for i in ids] == tokenizer.encode(rendered.removesuffix("\n"))


@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_assistant_turns_are_learned_with_their_end_of_turn(tokenizer, seed):
    rng = random.Random(seed)
    pieces = Teacher(tokenizer).demonstrate(LookupTask.draw(rng), rng)
    assert [piece.is_target for piece in pieces] == [k % 2 == 1 for k in range(len(pieces))]
    assert all(piece.text.endswith(END_OF_TURN) for piece in pieces if piece.is_target)


def test_the_teacher_guesses_often_enough_to_leave_something_to_learn(tokenizer):
    teacher, rng = Teacher(tokenizer), random.Random(0)
    tasks = [LookupTask.draw(rng) for _ in range(500)]
    right = [teacher.demonstrate(t, rng)[-1].text == answer_text(t.value) + END_OF_TURN for t in tasks]
    assert 0.35 < sum(right) / len(right) < 0.6


def test_a_drill_asks_for_the_same_words_again(tokenizer):
    shown, asked = Teacher(tokenizer).drill(random.Random(0))
    assert asked == (shown.text.removesuffix("\n") + END_OF_TURN, True)
    assert not shown.is_target


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("drill_loss", -1.0),
        ("max_drill_steps", -1),
        ("num_demo_steps", -1),
        ("drill_batch_size", 0),
        ("demo_batch_size", 0),
        ("decay_share", 0.0),
        ("decay_share", 1.1),
    ],
)
def test_a_warm_up_checks_its_numbers(name, value):
    with pytest.raises(InvalidInputError, match=f"{name} must be .* got {value}"):
        WarmUpConfig(**{name: value})
