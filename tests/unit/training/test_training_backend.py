"""The backend: gradients add up over calls, rows and losses until an update; what it computes; its checkpoints."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from support.adapted import with_lora
from support.architectures import tiny_model
from support.gradients import pull
from support.models import random_qwen3, tiny_qwen3
from support.prefixes import branching_rows
from support.rows import random_rows, row, unscored
from unbroken.errors import InvalidInputError, TrainingError
from unbroken.training.backend import TrainerBackend
from unbroken.training.config import OptimizerConfig, OptimizerName, Reference, SharedPrefixes, TrainerConfig
from unbroken.training.loss_config import ReferenceSync
from unbroken.training.model.batch import RowTargets
from unbroken.training.model.scores import Entropy

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
CONFIG = TrainerConfig(optimizer=OPTIMIZER, tokens_per_micro_batch=25)


def make_backend(config: TrainerConfig = CONFIG, *, seed: int = 0, reference=None) -> TrainerBackend:
    return TrainerBackend(tiny_qwen3(seed=seed), config, accelerator=Accelerator(), reference=reference)


def rows_of(seed: int, num_rows: int = 6):
    return unscored(random_rows(np.random.default_rng(seed), num_rows))


def add(backend, rows, loss=pull, **given):
    return backend.forward_backward(rows, loss, weights=[1 / len(rows)] * len(rows), **given)


def distance(scores, batch):
    """Another loss: the distance to the old logprobs."""
    return (batch.weights_N * (scores.logprobs_N - batch.old_logprobs_N).square()).sum(), None


def weights_of(backend) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in backend.named_weights()}


def assert_close(found, expected, atol=1e-6):
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=atol, rtol=0, msg=name)


def test_two_calls_and_one_update_are_one_call_with_all_rows():
    apart, together, only_first = make_backend(), make_backend(), make_backend()
    first, second = rows_of(0), rows_of(1)
    before = weights_of(apart)
    for part in (first, second):
        apart.forward_backward(part, pull, weights=[0.25] * 6)
    assert_close(weights_of(apart), before, atol=0)
    norm = apart.optimizer_step(1e-2)
    together.forward_backward([*first, *second], pull, weights=[0.25] * 12)
    assert norm == pytest.approx(together.optimizer_step(1e-2), rel=1e-5)
    assert_close(weights_of(apart), weights_of(together))
    only_first.forward_backward(first, pull, weights=[0.25] * 6)
    only_first.optimizer_step(1e-2)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (weights_of(apart)[name] - weights_of(only_first)[name]).abs().max() > 1e-4
    assert apart.num_updates == together.num_updates == 1


def test_losses_of_several_calls_add_up():
    apart, together = make_backend(), make_backend()
    rows = rows_of(0)
    add(apart, rows, pull)
    add(apart, rows, distance)
    add(together, rows, lambda scores, batch: (pull(scores, batch)[0] + distance(scores, batch)[0], None))
    assert apart.optimizer_step(1e-2) == pytest.approx(together.optimizer_step(1e-2), rel=1e-5)
    assert_close(weights_of(apart), weights_of(together))


def test_an_update_clears_the_gradients():
    once, twice = make_backend(), make_backend()
    add(twice, rows_of(0))
    twice.optimizer_step(0.0)
    for backend in (once, twice):
        add(backend, rows_of(1))
    assert once.optimizer_step(1e-2) == twice.optimizer_step(1e-2)


def test_weights_and_advantages_scale_what_a_row_adds():
    weighed, twice = make_backend(), make_backend()
    rows = rows_of(0)
    weighed.forward_backward(rows, pull, weights=[2.0, *[1.0] * 5])
    twice.forward_backward(rows, pull, weights=[1.0] * 6)
    twice.forward_backward(rows[:1], pull, weights=[1.0])
    assert weighed.optimizer_step(1e-2) == pytest.approx(twice.optimizer_step(1e-2), rel=1e-5)


@pytest.mark.parametrize("shared_prefixes", [SharedPrefixes.NEVER, SharedPrefixes.ALWAYS])
def test_a_call_has_the_logprobs_that_scoring_has(shared_prefixes):
    """In the order of the passes, which is not that of the rows."""
    backend = make_backend(replace(CONFIG, shared_prefixes=shared_prefixes, tokens_per_micro_batch=60))
    backend.measure()
    samples = branching_rows(np.random.default_rng(0), 9)
    rows = unscored(samples)
    scored = backend.logprobs(samples)
    passes = add(backend, rows, entropy=Entropy.TRAINED)
    assert sorted(passes.rows) == list(range(9))
    assert len(passes.logprobs) == 9
    for index, logprobs in zip(passes.rows, passes.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, scored[index][samples[index].loss_mask], atol=2e-6)
    assert (passes.num_shared > 0) == (shared_prefixes is SharedPrefixes.ALWAYS)
    assert sum(passes.stats) == sum(row.num_loss_tokens for row in rows)
    for scores, logprobs in zip(backend.score(samples), scored, strict=True):
        np.testing.assert_allclose(scores.logprobs, logprobs, atol=2e-6)


def test_a_call_without_rows_in_any_process_adds_nothing():
    alone, backend = make_backend(), make_backend()
    passes = backend.forward_backward([], pull, weights=[])
    assert passes.stats == passes.rows == passes.logprobs == ()
    for each in (alone, backend):
        add(each, rows_of(0))
    assert alone.optimizer_step(1e-2) == backend.optimizer_step(1e-2)


def test_gradients_that_are_not_finite_are_cleared_and_change_nothing():
    backend, alone = make_backend(), make_backend()
    before = weights_of(backend)
    add(backend, rows_of(0), lambda scores, batch: (scores.logprobs_N.sum() * float("inf"), None))
    with pytest.raises(TrainingError, match="norm is nan at update 0, which was not made"):
        backend.optimizer_step(1e-2)
    assert_close(weights_of(backend), before, atol=0)
    assert backend.num_updates == 0
    for each in (alone, backend):
        add(each, rows_of(1))
    assert alone.optimizer_step(1e-2) == backend.optimizer_step(1e-2)


def test_the_balance_of_experts_is_added_in_each_call():
    norms = []
    for weight in (0.0, 3.0):
        config = replace(CONFIG, router_loss_weight=weight)
        backend = TrainerBackend(tiny_model("qwen3_moe"), config, accelerator=Accelerator())
        passes = add(backend, rows_of(0))
        assert (passes.router_loss is None) == (weight == 0)
        norms.append(backend.optimizer_step(1e-2))
    assert norms[0] != norms[1]


@pytest.mark.parametrize("kind", ["full", "lora", "followed"])
def test_a_backend_goes_on_from_its_checkpoint_bit_for_bit(kind, tmp_path):
    def make() -> TrainerBackend:
        if kind == "lora":
            model = with_lora(tiny_qwen3())
            return TrainerBackend(model, CONFIG, accelerator=Accelerator(), reference=Reference.BASE)
        if kind == "full":
            return make_backend()
        config = replace(CONFIG, kl_weight=0.1, reference_sync=ReferenceSync(every=1, mixup=0.5))
        return make_backend(config, reference=tiny_qwen3())

    def update(backend: TrainerBackend, seed: int) -> None:
        add(backend, rows_of(seed))
        backend.optimizer_step(1e-2)
        if kind == "followed":
            backend.mix_into_reference(0.5)

    saved, loaded = make(), make()
    for seed in range(3):
        update(saved, seed)
    write = saved.copy_state(policy_version=7, processes=[{"rng": 5}])
    assert write is not None
    update(saved, 3)
    write(tmp_path / "state")  # of the state that was copied, whatever came after
    state = loaded.load(tmp_path / "state")
    assert (state.policy_version, state.num_updates, state.processes) == (7, 3, ({"rng": 5},))
    assert loaded.num_updates == 3
    update(loaded, 3)
    assert_close(weights_of(loaded), weights_of(saved), atol=0)
    samples = [each.sample for each in rows_of(9)]
    of_policy = saved.logprobs(samples)
    assert_same_logprobs(loaded.logprobs(samples), of_policy)
    if saved.has_reference:
        assert_same_logprobs(loaded.reference_logprobs(samples), of_reference := saved.reference_logprobs(samples))
        assert np.nanmax(np.abs(np.concatenate(of_policy) - np.concatenate(of_reference))) > 1e-4


def assert_same_logprobs(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_temperature_of_the_rows_is_that_of_a_call():
    cold, warm = (row([1, 2, 3, 4], sampled=[2, 3], temperature=temperature) for temperature in (0.5, 1.0))
    backend = make_backend()
    passes = add(backend, unscored([cold]))
    np.testing.assert_allclose(passes.logprobs[0], backend.logprobs([cold])[0][2:], atol=2e-6)
    assert np.abs(passes.logprobs[0] - backend.logprobs([warm])[0][2:]).max() > 1e-3


EIGHT_BITS = replace(CONFIG, optimizer=replace(OPTIMIZER, name=OptimizerName.ADAMW_8BIT))


def wide_backend(config: TrainerConfig, *, seed: int = 0) -> TrainerBackend:
    """Its matrices are large enough to be quantised."""
    model = random_qwen3(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
        max_position_embeddings=256,
        initializer_range=0.3,
        seed=seed,
    )
    return TrainerBackend(model, config, accelerator=Accelerator())


@torch.compiler.set_stance("force_eager")
def test_averages_of_8_bits_train_nearly_as_those_of_32_and_continue_bit_for_bit(tmp_path):
    pytest.importorskip("torchao")
    exact, rounded, resumed = wide_backend(CONFIG), wide_backend(EIGHT_BITS), wide_backend(EIGHT_BITS, seed=1)
    before = weights_of(exact)
    for number in range(3):
        for backend in (exact, rounded):
            add(backend, rows_of(number))
            backend.optimizer_step(1e-2)
    moved, off = (
        sum(float((weights_of(rounded)[name] - other).square().sum()) for name, other in others.items())
        for others in (before, weights_of(exact))
    )
    assert 0 < off < 0.01 * moved
    rounded.copy_state(policy_version=3, processes=[{}])(tmp_path / "state")
    resumed.load(tmp_path / "state")
    for backend in (rounded, resumed):
        add(backend, rows_of(9))
        backend.optimizer_step(3e-3)
    assert_close(weights_of(resumed), weights_of(rounded), atol=0)


def test_averages_of_8_bits_name_the_extra_that_they_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(InvalidInputError, match=r"trainer.optimizer.name adamw_8bit needs the torchao extra: pip inst"):
        make_backend(EIGHT_BITS)


class LimitedMemory:
    """A loss for which memory is out in passes of more ids, as a GPU's is, and in those that `fails` names."""

    def __init__(self, max_ids):
        self.max_ids = max_ids
        self.sizes = []

    def __call__(self, scores, batch):
        self.sizes.append(batch.token_ids_BT.numel())
        value, stats = pull(scores, batch)
        if batch.token_ids_BT.numel() > self.max_ids:
            value.backward(retain_graph=True)  # some gradients are there when memory is out
            raise torch.OutOfMemoryError("CUDA out of memory")
        return value, stats


def test_a_pass_that_runs_out_of_memory_is_made_again_in_halves_as_if_it_had_begun_so(caplog):
    rows = rows_of(0, 12)
    begun_large = make_backend(replace(CONFIG, tokens_per_micro_batch=100))
    begun_small = make_backend(replace(CONFIG, tokens_per_micro_batch=25))
    loss = LimitedMemory(30)
    found, expected = add(begun_large, rows, loss), add(begun_small, rows)
    assert max(loss.sizes) > 30
    assert found.rows == expected.rows
    np.testing.assert_array_equal(np.concatenate(found.logprobs), np.concatenate(expected.logprobs))
    assert begun_large.optimizer_step(1e-2) == begun_small.optimizer_step(1e-2)
    assert_close(weights_of(begun_large), weights_of(begun_small), atol=0)
    assert "trainer.tokens_per_micro_batch = 25 makes a run begin so" in caplog.text
    loss.sizes.clear()
    add(begun_large, rows, loss)
    assert max(loss.sizes) <= 25  # the smaller size stays


def test_a_row_that_does_not_fit_alone_is_an_error_that_says_what_helps():
    backend, rows = make_backend(replace(CONFIG, tokens_per_micro_batch=100)), rows_of(0)
    longest = max(len(each.sample.token_ids) for each in rows)
    with pytest.raises(TrainingError, match=rf"a row of {longest} ids needs more memory.*trainer.gradient_checkpoint"):
        add(backend, rows, LimitedMemory(longest - 1))
    assert all(parameter.grad is None for parameter in backend.policy.parameters())


def test_gradients_of_earlier_calls_are_not_lost_when_memory_is_out():
    backend, rows = make_backend(replace(CONFIG, tokens_per_micro_batch=100)), rows_of(0)
    add(backend, rows)
    with pytest.raises(TrainingError, match=r"earlier calls since the last update would be lost: set trainer.tokens"):
        add(backend, rows, LimitedMemory(30))


def test_scores_that_run_out_of_memory_are_computed_again_in_smaller_passes(monkeypatch):
    samples = [each.sample for each in rows_of(0, 12)]
    expected = make_backend().logprobs(samples)
    backend = make_backend(replace(CONFIG, tokens_per_micro_batch=100))
    forward = type(backend.policy).forward

    def limited(policy, token_ids_BT, *given):
        if token_ids_BT.numel() > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(policy, token_ids_BT, *given)

    monkeypatch.setattr(type(backend.policy), "forward", limited)
    for found, own in zip(backend.logprobs(samples), expected, strict=True):
        np.testing.assert_array_equal(found, own)


def with_own_targets(rows, *, num_targets=None):
    """The rows' own next ids as targets, with half of the loss tokens without an effect; or several times."""
    out = []
    for each in rows:
        ids = each.sample.token_ids[each.sample.loss_mask].astype(np.int64)
        trained = np.arange(len(ids)) % 2 == 0
        if num_targets is not None:
            ids = np.repeat(ids[:, None], num_targets, axis=1)
        out.append(replace(each, targets=RowTargets(ids=ids, trained=trained, values={"trained": trained * 1.0})))
    return out


def pull_trained(scores, batch):
    """Half of the loss tokens, by what comes with the rows or by their places."""
    logprobs_NK = scores.logprobs_N if scores.logprobs_N.dim() == 2 else scores.logprobs_N[:, None]
    places = [torch.arange(number) % 2 == 0 for number in batch.num_row_tokens]
    trained_N = batch.values.get("trained", torch.cat(places).double())
    return -(logprobs_NK * trained_N[:, None]).sum().float(), None


@pytest.mark.parametrize("num_targets", [None, 1, 2])
def test_own_ids_as_targets_have_the_logprobs_and_the_gradient_of_the_rows(num_targets):
    rows, times = rows_of(0), num_targets or 1
    own, other = make_backend(), make_backend()
    found = add(other, with_own_targets(rows, num_targets=num_targets), pull_trained)
    for _ in range(times):
        expected = add(own, rows, pull_trained)
    assert found.rows == expected.rows
    for of_row, alone in zip(found.logprobs, expected.logprobs, strict=True):
        assert of_row.shape == (alone.shape if num_targets is None else (*alone.shape, num_targets))
        np.testing.assert_allclose(of_row.reshape(len(alone), -1), np.tile(alone[:, None], times), atol=1e-6)
    assert other.optimizer_step(1e-2) == pytest.approx(own.optimizer_step(1e-2), rel=1e-5)


def test_a_forward_alone_has_the_loss_and_no_gradient():
    backend, rows = make_backend(), rows_of(0)
    alone = add(backend, rows, loss=pull, backward=False)
    assert all(parameter.grad is None for parameter in backend.policy.parameters())
    both = add(backend, rows, loss=pull)
    assert alone.rows == both.rows
    for one, other in zip(alone.logprobs, both.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_can_have_a_norm_of_its_own():
    backend, free = make_backend(), make_backend()
    before = weights_of(backend)
    for each in (backend, free):
        add(each, rows_of(0))
    norm = backend.optimizer_step(1e-2, max_grad_norm=1e-9)
    assert norm == free.optimizer_step(1e-2, max_grad_norm=float("inf")) > 1e-3
    moved = [
        sum(float((tensor - before[name]).abs().sum()) for name, tensor in weights_of(each).items())
        for each in (backend, free)
    ]
    assert moved[0] < 1e-3 * moved[1]
