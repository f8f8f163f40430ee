"""Rows that share the ids that they begin with train as rows that do not: each logprob, and each gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from support.adapted import with_lora
from support.effort import num_cases
from support.gradients import SUBTRACT_GRADIENT, flatten, step_gradient
from support.models import tiny_qwen3
from support.prefixes import branching_pairs, branching_rows, branching_trajectories
from unbroken.demo.lookup import JsonStyle, LookupTask, answer_text, call_text, lookup_env
from unbroken.demo.model import build_model, build_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.tree import export_samples
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.training.config import OldLogprobs, Packing, Reference, SharedPrefixes, TrainerConfig
from unbroken.training.loss_config import Correction, CorrectionKind, DpoConfig
from unbroken.training.model.batch import ScoredRow, collate
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.row_scores import score_rows
from unbroken.training.model.scores import Entropy
from unbroken.training.model.tree_attention import MaskKind
from unbroken.training.model.varlen import attention_by_rows
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.policy_gradient import ALGORITHMS, PolicyGradient
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams

CPU = torch.device("cpu")
SUBTRACT_MUCH = replace(SUBTRACT_GRADIENT, learning_rate=1000 * SUBTRACT_GRADIENT.learning_rate)
"""A thousandfold gradient, beside which the rounding of the weights that it is read off from is small."""
ALWAYS, NEVER = SharedPrefixes.ALWAYS, SharedPrefixes.NEVER


def exact_gpt2():
    """In float64 throughout: its norms are torch's own, and it has no rotary tables."""
    config = GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).double().eval()


def exact_qwen3():
    return in_float64(tiny_qwen3(vocab_size=16))


def in_float64(model):
    """With torch's norms: its own are computed in float32."""
    model = model.double()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon, dtype=torch.float64)
                setattr(parent, name, norm)
    return model


def compute(policy: PolicyLogprobs, rows, *, as_tree: bool, temperature: float = 0.7):
    """Logprobs, entropies, loss and gradient of rows in one pass, with every term that a loss may have."""
    scored = [
        ScoredRow(sample=each, old_logprobs=each.rollout_logprobs + 0.1, reference_logprobs=each.rollout_logprobs - 0.2)
        for each in rows
    ]
    weights = np.linspace(0.2, 1, len(rows)).tolist()
    batch = collate([scored] if as_tree else [[each] for each in scored], weights, CPU, as_tree=as_tree)
    config = TrainerConfig(kl_weight=0.1, entropy_weight=0.1)
    scores = policy(
        batch.token_ids_BT,
        batch.loss_mask_BT,
        temperature,
        None,
        batch.position_ids_BT,
        Entropy.TRAINED,
        None,
        batch.tree,
    )
    loss = PolicyGradient().batch_loss(scores, batch, config).loss
    policy.zero_grad()
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    return scores.logprobs_N.detach(), scores.entropies_N.detach(), loss.detach(), gradient


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


EXACT = {"gpt2": exact_gpt2, "qwen3": exact_qwen3}


@pytest.fixture(scope="module", params=EXACT)
def exact_policy(request):
    policy = PolicyLogprobs(EXACT[request.param](), chunk_size=7, shared_prefixes=ALWAYS)
    policy.allow_trees()
    return policy


@settings(max_examples=num_cases(25, in_fuzz=600), derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_for_any_tree_each_logprob_and_the_gradient_are_those_of_the_rows_in_float64(exact_policy, seed, num_rows):
    """Logprobs and entropies within 1e-10 nats; loss and gradient within 1e-10 of their size and norm."""
    rows = branching_rows(np.random.default_rng(seed), num_rows, vocab_size=16, longest=30)
    of_tree, of_rows = (compute(exact_policy, rows, as_tree=as_tree) for as_tree in (True, False))
    assert of_tree[0].dtype == torch.float64
    for found, expected in zip(of_tree[:2], of_rows[:2], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert relative(of_tree[2], of_rows[2]) < 1e-10
    assert relative(of_tree[3], of_rows[3]) < 1e-10


@settings(max_examples=num_cases(15, in_fuzz=300), derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_for_any_tree_each_logprob_and_the_gradient_are_those_of_the_rows_in_float32(seed, num_rows):
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=7, shared_prefixes=ALWAYS)
    policy.allow_trees()
    rows = branching_rows(np.random.default_rng(seed), num_rows, longest=40)
    of_tree, of_rows = (compute(policy, rows, as_tree=as_tree) for as_tree in (True, False))
    torch.testing.assert_close(of_tree[0], of_rows[0], atol=1e-5, rtol=1e-5)
    assert relative(of_tree[2], of_rows[2]) < 1e-5
    assert relative(of_tree[3], of_rows[3]) < 1e-5


def test_the_gradient_notices_when_a_branch_is_predicted_from_another_node(exact_policy):
    """The comparisons above can fail."""
    rows = branching_rows(np.random.default_rng(5), 6, vocab_size=16, longest=30)
    right = compute(exact_policy, rows, as_tree=True)
    original = exact_policy._hidden_of_tree
    exact_policy._hidden_of_tree = lambda *inputs: original(*inputs).roll(1, 1)
    try:
        assert relative(compute(exact_policy, rows, as_tree=True)[3], right[3]) > 1e-2
    finally:
        exact_policy._hidden_of_tree = original


def update(
    model,
    units,
    shared_prefixes,
    *,
    reference=None,
    objective=None,
    accelerator=None,
    limit=60,
    optimizer=SUBTRACT_MUCH,
    **others,
):
    """A step's statistics and a multiple of its gradient, read off the update that it made."""
    config = TrainerConfig(optimizer=optimizer, shared_prefixes=shared_prefixes, tokens_per_micro_batch=limit, **others)
    trainer = Trainer(model, config, objective=objective, reference=reference, accelerator=accelerator)
    stats, gradient = step_gradient(trainer, units)
    return stats, flatten(gradient)


def rows_of(seed: int = 0, num_rows: int = 9):
    return branching_rows(np.random.default_rng(seed), num_rows, longest=30)


WAYS = {
    "plain": {},
    "several passes": {"limit": 45},
    "two minibatches": {"num_minibatches": 2, "optimizer": SUBTRACT_GRADIENT},
    "old logprobs": {"old_logprobs": OldLogprobs.RECOMPUTE},
    "never packed": {"packing": Packing.NEVER},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "entropy": {"entropy_weight": 0.1},
    "correction": {
        "old_logprobs": OldLogprobs.RECOMPUTE,
        "correction": Correction(kind=CorrectionKind.SEQUENCE_TRUNCATE, high=2.0),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_with_shared_prefixes_is_the_step_without(way):
    options = dict(WAYS[way])
    rows = rows_of()
    expected, gradient = update(tiny_qwen3(), rows, NEVER, **options)
    found, shared = update(tiny_qwen3(), rows, ALWAYS, **options)
    check_same(found, expected)
    if options.get("num_minibatches", 1) == 1:  # else the second update begins where the first has led
        assert relative(shared, gradient) < 1e-5
    assert found.shared_share > 0.1
    assert expected.shared_share == 0


def check_same(found, expected):
    for name in ("loss", "k3", "mean_ratio", "entropy", "clip_fraction", "corrected_fraction", "grad_norm"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4, abs=1e-5), name
    assert found.mismatch.k3 == pytest.approx(expected.mismatch.k3, rel=1e-4)
    assert found.num_loss_tokens == expected.num_loss_tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_mask_suits_the_models_attention(attention):
    model = tiny_qwen3()
    model.config._attn_implementation = attention
    expected, gradient = update(model, rows_of(), NEVER)
    model = tiny_qwen3()
    model.config._attn_implementation = attention
    found, shared = update(model, rows_of(), ALWAYS)
    check_same(found, expected)
    assert relative(shared, gradient) < 1e-5


def test_only_adapters_are_trained_and_the_base_scores_the_same_trees_as_reference():
    options = {"reference": Reference.BASE, "kl_weight": 0.1}
    expected, gradient = update(with_lora(tiny_qwen3()), rows_of(), NEVER, **options)
    found, shared = update(with_lora(tiny_qwen3()), rows_of(), ALWAYS, **options)
    check_same(found, expected)
    assert found.reference_k3 == pytest.approx(expected.reference_k3, rel=1e-4)
    assert relative(shared, gradient) < 1e-5


def test_a_loss_over_whole_trajectories_sees_those_of_several_rows():
    units = branching_trajectories(np.random.default_rng(0), 4)
    expected, gradient = update(tiny_qwen3(), units, NEVER, objective=ALGORITHMS["gspo"])
    found, shared = update(tiny_qwen3(), units, ALWAYS, objective=ALGORITHMS["gspo"])
    check_same(found, expected)
    assert relative(shared, gradient) < 1e-5


def test_the_two_rows_of_a_pair_share_their_prompt():
    pairs = branching_pairs(np.random.default_rng(0), 4)
    options = {"objective": OnlineDpo(), "dpo": DpoConfig(beta=0.3)}
    expected, gradient = update(tiny_qwen3(), pairs, NEVER, reference=tiny_qwen3(seed=1), **options)
    found, shared = update(tiny_qwen3(), pairs, ALWAYS, reference=tiny_qwen3(seed=1), **options)
    check_same(found, expected)
    assert relative(shared, gradient) < 1e-5
    assert found.shared_share > 0.2


def score(setting, rows):
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=64, shared_prefixes=setting)
    policy.allow_trees()
    planned = policy.plan_rows([each.token_ids for each in rows], 45)
    assert any(each.is_tree for each in planned) is (setting is not NEVER)
    return score_rows(policy, rows, tokens_per_micro_batch=45, images=None, device=CPU)


@pytest.mark.parametrize("setting", [SharedPrefixes.AUTO, ALWAYS])
def test_logprobs_come_back_in_the_order_of_the_rows(setting):
    rows = [*rows_of(1, 12), *rows_of(2, 3)]
    found, expected = (score(setting, rows), score(NEVER, rows))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_in_bfloat16_the_gradient_differs_by_rounding_only(bfloat16):
    """As much as it differs between other groupings of the same rows."""
    options = {"accelerator": bfloat16}
    _, padded = update(tiny_qwen3(), rows_of(), NEVER, packing=Packing.NEVER, **options)
    _, packed = update(tiny_qwen3(), rows_of(), NEVER, packing=Packing.ONE_LANE, **options)
    _, shared = update(tiny_qwen3(), rows_of(), ALWAYS, **options)
    assert relative(shared, padded) < 3 * relative(packed, padded)


async def test_the_rollouts_of_the_demo_share_the_prompt_and_the_turns_that_they_have_in_common():
    tokenizer = build_tokenizer()
    rows = await demo_rows(tokenizer)
    expected, gradient = update(build_model(tokenizer, seed=0), rows, NEVER, limit=4096)
    found, shared = update(build_model(tokenizer, seed=0), rows, SharedPrefixes.AUTO, limit=4096)
    check_same(found, expected)
    assert relative(shared, gradient) < 1e-5
    assert found.shared_share > 0.5
    policy = PolicyLogprobs(in_float64(build_model(tokenizer, seed=0)), chunk_size=64, shared_prefixes=ALWAYS)
    policy.allow_trees()
    of_tree, of_rows = (compute(policy, rows, as_tree=as_tree) for as_tree in (True, False))
    torch.testing.assert_close(of_tree[0], of_rows[0], atol=1e-10, rtol=0)
    assert relative(of_tree[3], of_rows[3]) < 1e-10


async def demo_rows(tokenizer):
    """Of four rollouts of one task of the demo."""
    task = LookupTask(keys=("raka", "tuvo"), value="pemi", style=JsonStyle.CANONICAL)
    calls = {style: [call_text(key, style) for key in task.keys] for style in JsonStyle}
    said = [
        [*calls[JsonStyle.CANONICAL], answer_text("pemi")],
        [*calls[JsonStyle.COMPACT], answer_text("pemi")],
        [calls[JsonStyle.CANONICAL][0], calls[JsonStyle.COMPACT][1], answer_text("pemi")],
        [calls[JsonStyle.CANONICAL][0], answer_text("tuvo")],
    ]
    rows = []
    for number, texts in enumerate(said):
        trajectory = await run_rollout(
            lookup_env(task),
            engine=ScriptedEngine([tokenizer.encode(text + "<|im_end|>") for text in texts]),
            renderer=TemplateRenderer(tokenizer),
            sampling=SamplingParams(max_tokens=40),
            limits=Limits(max_turns=4),
        )
        assert trajectory.error is None
        rows += export_samples(trajectory.tree, 0.5 - number)
    return rows


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_in_blocks_gives_the_logprobs_of_rows():
    """By its plain mathematics: no CPU computes its gradient, nor has its kernel."""
    rows = branching_rows(np.random.default_rng(0), 12, longest=120)
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=64, shared_prefixes=ALWAYS)
    with torch.no_grad(), attention_by_rows(policy.causal):
        expected = score_rows(policy, rows, tokens_per_micro_batch=500, images=None, device=CPU)
        policy.tree_mask = MaskKind.BLOCKS
        assert any(planned.is_tree for planned in policy.plan_rows([each.token_ids for each in rows], 500))
        found = score_rows(policy, rows, tokens_per_micro_batch=500, images=None, device=CPU)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_rows_that_share_little_are_left_as_they_are():
    rows = branching_rows(np.random.default_rng(0), 1) + branching_rows(np.random.default_rng(1), 1)
    stats, _ = update(tiny_qwen3(), rows, SharedPrefixes.AUTO)
    assert stats.shared_share == 0


@pytest.mark.parametrize(("setting", "mask"), [(NEVER, None), (SharedPrefixes.AUTO, MaskKind.BOOLEAN)])
def test_what_a_model_allows_is_found_out_once_in_the_first_step(setting, mask):
    """Before, an engine in the process may have the memory that a gradient needs."""
    trainer = Trainer(tiny_qwen3(), TrainerConfig(shared_prefixes=setting))
    policy = trainer.backend.policy
    assert policy.tree_mask is None
    trainer.step(rows_of())
    assert policy.tree_mask is mask
    num_calls = []
    policy.causal.model.register_forward_hook(lambda *_: num_calls.append(1))
    trainer.step(rows_of())
    assert len(num_calls) == len(policy.plan_rows([each.token_ids for each in rows_of()], 12_288))
