"""A reward model scores whole conversations in its own template, and its scores train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from support.models import tiny_qwen3
from unbroken.demo.model import build_tokenizer
from unbroken.errors import InvalidInputError, RewardError
from unbroken.rendering.loader import load_renderer
from unbroken.runs.prompts.reward_model import RewardModel
from unbroken.runs.prompts.rewards import RewardConfig, Rewards

CONVERSATIONS = [
    [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": answer}]
    for answer in ("7", "I think it is eight", "")
]


def save_model(folder: Path, **changes: object) -> Path:
    tokenizer = build_tokenizer()
    config = tiny_qwen3(vocab_size=len(tokenizer)).config
    config.update({"num_labels": 1, "pad_token_id": None, **changes})
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scores_by_hand(folder: Path) -> list[float]:
    """The classifier's head on the last hidden state of each conversation, one at a time."""
    model = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    renderer = load_renderer(folder)
    found = []
    for conversation in CONVERSATIONS:
        ids = torch.from_numpy(renderer.render_ids(conversation).astype("int64"))[None]
        with torch.no_grad():
            found.append(float(model.score(model.model(input_ids=ids).last_hidden_state[0, -1])))
    return found


@pytest.mark.parametrize("pad_token_id", [None, 0])
def test_the_score_is_the_heads_at_the_last_id_also_in_a_padded_batch(tmp_path, pad_token_id):
    folder = save_model(tmp_path, pad_token_id=pad_token_id)
    scores = RewardModel(folder, batch_size=2, device="cpu")(CONVERSATIONS)
    assert scores == pytest.approx(scores_by_hand(folder), abs=1e-5)
    assert len(set(scores)) == 3


def test_a_model_is_a_reward_beside_functions(tmp_path):
    folder = save_model(tmp_path / "judge")
    (tmp_path / "rewards.py").write_text("def short(completions):\n    return [1.0] * len(completions)\n")
    configs = (RewardConfig(model=str(folder), weight=0.5), RewardConfig(function=tmp_path / "rewards.py:short"))
    rewards = Rewards(configs, ["prompt"])
    assert [function.name for function in rewards._functions] == ["judge", "short"]
    assert rewards._functions[0]._function(CONVERSATIONS) == pytest.approx(scores_by_hand(folder), abs=1e-5)


@pytest.mark.parametrize("given", [{}, {"model": "m", "function": Path("a.py:b")}])
def test_a_reward_is_a_function_or_a_model(given):
    with pytest.raises(InvalidInputError, match=r"exactly one of function and model must be given, got function="):
        RewardConfig(**given)


def test_a_classifier_with_two_outputs_is_no_reward_model(tmp_path):
    folder = save_model(tmp_path, num_labels=2)
    with pytest.raises(InvalidInputError, match=r"must have one output, the reward, and .* has 2 \(num_labels\)"):
        RewardModel(folder)


def test_a_model_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=f"model must be a folder or .* got '{tmp_path}'"):
        RewardModel(tmp_path)


def test_a_conversation_beyond_the_context_is_refused_and_not_cut(tmp_path):
    folder = save_model(tmp_path, max_position_embeddings=16)
    with pytest.raises(RewardError, match=r"messages\[0\] has \d+ tokens, and the reward model takes 16"):
        RewardModel(folder)(CONVERSATIONS)
