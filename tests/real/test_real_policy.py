"""I9 on real weights: the tokenizer of another model, and a fault in a layer, end a command at its start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from unbroken.cli import main
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import PolicyMismatchError
from unbroken.exactness import choose_probe_ids
from unbroken.rendering.loader import load_renderer
from unbroken.runs.policy_check import check_against_folder
from unbroken.training.config import Packing
from unbroken.training.model.logprobs import PolicyLogprobs

pytestmark = pytest.mark.real

TASK = Path(__file__).with_name("task.toml")


@pytest.fixture
def with_other_tokenizer(model: Path, tmp_path: Path) -> Path:
    """The real weights beside a tokenizer in which each piece of text has the id of another one."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    special = {each["content"] for each in tokenizer["added_tokens"]}
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    texts = [text for text in vocab if text not in special]
    ids = [vocab[text] for text in texts]
    vocab.update(zip(texts, [*ids[1000:], *ids[:1000]], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_i9_a_run_with_the_tokenizer_of_another_model_ends_before_its_first_step(
    with_other_tokenizer, tmp_path, capsys
):
    words = ["--model", str(with_other_tokenizer), "--output", str(tmp_path / "run"), "--loop.num-steps", "1"]
    assert main(["train", str(TASK), *words]) == 1
    printed = capsys.readouterr()
    assert "the prompts are no text to this model (I9)" in printed.err
    assert "Are tokenizer and chat template this model's?" in printed.err
    assert "step 0" not in printed.out


async def test_i9_one_layer_of_thirty_in_the_place_of_another_is_found(model):
    """In bfloat16, whose own rounding is k3 1e-3 on these weights."""
    wrong: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    layers = wrong.model.layers
    layers[10].mlp, layers[20].mlp = layers[20].mlp, layers[10].mlp
    engine = TransformersEngine(wrong)
    try:
        with pytest.raises(PolicyMismatchError, match="two policies"):
            await check_against_folder(engine, model, load_renderer(str(model)))
    finally:
        await engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_scores_in_either_precision(model, dtype):
    """A teacher's weights and those below adapters are bfloat16: the checks at its start are not of rounding alone."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    policy = PolicyLogprobs(loaded, chunk_size=1024, packing=Packing.ONE_LANE)
    ids = choose_probe_ids(8, policy.vocab_size, loaded.device)[None]
    with torch.no_grad():
        assert policy(ids, torch.arange(8)[None] > 0, 1.0).logprobs_N.isfinite().all()
