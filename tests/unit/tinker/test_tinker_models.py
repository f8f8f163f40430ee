"""Models of a Tinker server against plain torch in float64: logprobs, each loss, gradients, Adam, saved folders."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import weakref
from dataclasses import replace
from operator import attrgetter, methodcaller
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tinker.types import AdamParams, LoraConfig

from support.adapted import untied_qwen3
from support.architectures import tiny_model
from support.models import tiny_qwen3
from support.plain_qwen3 import PlainAdamW, compute_logprobs, find_gradients
from unbroken.errors import CheckpointError, EngineError, InvalidInputError, TrainingError
from unbroken.tinker import models
from unbroken.tinker.losses import Datum
from unbroken.tinker.models import Models, Output, TrainerProcess, find_modules

EXACT = 1e-6
ADAPTER = LoraConfig(rank=3, seed=7)
VOCAB_SIZE = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    untied_qwen3().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tied")
    tiny_qwen3().save_pretrained(path)
    return path


def open_models(folder, *, dtype=torch.float64, **config) -> Models:
    return Models(folder, accelerator=Accelerator(cpu=True), dtype=dtype, **config)


def open_model(folder, **config) -> Models:
    """With the model `a`."""
    models = open_models(folder, **config)
    models.create("a", ADAPTER)
    return models


def train(models, data, **params) -> Output:
    """A pass and a step of the model `a`; returns the pass's output."""
    output = models.forward_backward("a", data, "cross_entropy", {}, backward=True)
    models.optim_step("a", AdamParams(**params))
    return output


def make_data(loss: str, *, seed: int = 0, lengths=(5, 9, 1, 7)) -> list[Datum]:
    """Rows as of a policy that has moved since it sampled: prompts with no advantage, ratios on both sides of 1."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        ids = rng.integers(0, VOCAB_SIZE, length + 1)
        sampled = (np.arange(length) >= length // 3).astype(np.float32)
        inputs = {"advantages": rng.normal(size=length) * sampled, "logprobs": rng.normal(-4.2, 0.7, length) * sampled}
        if loss == "cross_entropy":
            inputs = {"weights": rng.normal(size=length) * sampled}
        if loss == "gspo":
            inputs |= {"sequence_ratio_mask": sampled, "clip_low_threshold": np.full(length, 0.8)}
            inputs |= {"clip_high_threshold": np.full(length, 1.3)}
        if loss == "stable_reinforce":
            inputs["sampled"] = sampled
        arrays = {name: values.astype(np.float32) for name, values in inputs.items()}
        data.append(Datum(input_ids=ids[:-1].astype(np.int32), targets=ids[1:].astype(np.int64), inputs=arrays))
    return data


def plain_loss(loss: str, logp: torch.Tensor, inputs: dict, settings: dict) -> torch.Tensor:
    """The formulas of the API's page on losses, over all positions of a datum."""
    given = {name: torch.from_numpy(values).double() for name, values in inputs.items()}
    if loss == "cross_entropy":
        return -(logp * given["weights"]).sum()
    advantages, ratio = given["advantages"], torch.exp(logp - given["logprobs"])
    low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "ppo":
        return -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()
    if loss == "cispo":
        bounded = torch.clamp(ratio, settings.get("clip_low_threshold", 0), settings.get("clip_high_threshold", 4))
        return -(bounded.detach() * logp * advantages).sum()
    if loss == "dro":
        beta = settings.get("beta", 0.1)
        return -(logp * advantages - 0.5 * beta * (logp - given["logprobs"]) ** 2).sum()
    if loss == "gspo":
        mask = given["sequence_ratio_mask"] != 0
        shared = (logp.detach() - given["logprobs"])[mask].mean()
        ratio = torch.exp(shared + logp - logp.detach())
        bounded = torch.clamp(ratio, given["clip_low_threshold"], given["clip_high_threshold"])
        return -torch.min(ratio * advantages, bounded * advantages).sum()
    assert loss == "stable_reinforce"
    weight = torch.exp(torch.clamp(logp.detach() - given["logprobs"], max=0))
    penalty = settings.get("kl_coeff", 0.01) / 2 * (logp - given["logprobs"]) ** 2
    return ((penalty - weight * advantages * logp) * given["sampled"]).sum()


class Plain:
    """The same model, trained by plain torch."""

    def __init__(self, folder, adapter_folder) -> None:
        self.weights = {name: each.double() for name, each in load_file(folder / "model.safetensors").items()}
        self.config = untied_qwen3().config
        self.optimizer = PlainAdamW(load_file(adapter_folder / "adapter_model.safetensors"))

    def target_logprobs(self, adapter, datum: Datum) -> torch.Tensor:
        logprobs_TV = compute_logprobs(self.weights, adapter, self.config, torch.from_numpy(datum.input_ids).long())
        targets = torch.from_numpy(datum.targets)
        picked = logprobs_TV.gather(-1, targets if targets.dim() == 2 else targets[:, None])
        return picked.reshape(targets.shape)

    def total(self, adapter, data, loss, settings):
        return sum(plain_loss(loss, self.target_logprobs(adapter, each), each.inputs, settings) for each in data)


def copy_weights(models) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in models.adapter("a")}


def assert_close(found, expected, tolerance=EXACT):
    """Relative to the largest of all."""
    assert found.shape == expected.shape
    scale = max(float(np.abs(np.asarray(expected)).max(initial=0)), 1e-12)
    assert float(np.abs(np.asarray(found) - np.asarray(expected)).max(initial=0)) <= tolerance * scale


CASES = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}),
    ("dro", {}),
    ("dro", {"beta": 0.5}),
    ("gspo", {}),
    ("stable_reinforce", {}),
    ("stable_reinforce", {"kl_coeff": 0.3}),
]


@pytest.mark.parametrize(("loss", "settings"), CASES)
def test_three_steps_are_those_of_plain_torch(loss, settings, folder, tmp_path):
    """Logprobs and sums of each call, and after each step all weights; the first gradient of A is 0, later ones not."""
    models = open_model(folder)
    models.save("a", tmp_path / "0", optimizer=False)
    plain = Plain(folder, tmp_path / "0")
    for number in (1, 2, 3):
        data = make_data(loss, seed=number)
        output = models.forward_backward("a", data, loss, settings, backward=True)
        adapter = dict(plain.optimizer.parameters)
        for found, datum in zip(output.logprobs, data, strict=True):
            assert found.dtype == np.float32
            assert_close(found, plain.target_logprobs(adapter, datum).numpy())
        expected = float(plain.total(adapter, data, loss, settings))
        assert output.metrics["loss:sum"] == pytest.approx(expected, rel=EXACT)
        gradients = find_gradients(adapter, lambda leaves, data=data: plain.total(leaves, data, loss, settings))
        assert number == 1 or all(float(each.abs().max()) > 0 for each in gradients.values())
        params = {"learning_rate": 0.02, "weight_decay": 0.1, "grad_clip_norm": 0.5 if number == 3 else 0.0}
        norm = plain.optimizer.step(gradients, **params)
        metrics = models.optim_step("a", AdamParams(**params))
        assert metrics["grad_norm"] == pytest.approx(norm, rel=EXACT)
        models.save("a", tmp_path / str(number), optimizer=True)
        weights = load_file(tmp_path / str(number) / "adapter_model.safetensors")
        averages = load_file(tmp_path / str(number) / "optimizer.safetensors")
        assert weights.keys() == plain.optimizer.parameters.keys()
        for name, weight in weights.items():
            first, second = averages[f"{name}.exp_avg"], averages[f"{name}.exp_avg_sq"]
            assert_close(first, plain.optimizer.first[name])
            assert_close(second, plain.optimizer.second[name])
            step = first / (1 - 0.9**number) / ((second / (1 - 0.95**number)).sqrt() + 1e-12)
            assert_close(weight, adapter[name] * (1 - 0.02 * 0.1) - 0.02 * step, 1e-12)
            assert_close(weight, plain.optimizer.parameters[name], 1e-4)  # a step divides small gradients by as small
        plain.optimizer.parameters |= weights


def test_sparse_targets_have_logprobs_and_gradients_of_each(folder, tmp_path):
    models = open_model(folder)
    models.save("a", tmp_path / "0", optimizer=False)
    plain = Plain(folder, tmp_path / "0")
    rng = np.random.default_rng(3)
    data = [
        Datum(
            input_ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
            targets=rng.integers(0, VOCAB_SIZE, shape),
            inputs={"weights": rng.normal(size=shape).astype(np.float32)},
        )
        for length, shape in ((4, (4, 3)), (6, (6,)), (2, (2, 5)), (1, (1, 1)))
    ]
    output = models.forward_backward("a", data, "cross_entropy", {}, backward=True)
    for found, datum in zip(output.logprobs, data, strict=True):
        assert found.shape == datum.targets.shape
        assert_close(found, plain.target_logprobs(plain.optimizer.parameters, datum).numpy())
    gradients = find_gradients(
        plain.optimizer.parameters, lambda leaves: plain.total(leaves, data, "cross_entropy", {})
    )
    norm = plain.optimizer.step(gradients, learning_rate=0.01)
    assert models.optim_step("a", AdamParams(learning_rate=0.01))["grad_norm"] == pytest.approx(norm, rel=EXACT)


def test_a_custom_loss_of_the_client_is_a_forward_and_weights(folder, tmp_path):
    """As the SDK does it: weights are minus the gradient of the client's loss for the logprobs."""
    models = open_model(folder)
    models.save("a", tmp_path / "0", optimizer=False)
    plain = Plain(folder, tmp_path / "0")
    data = make_data("cross_entropy", seed=2)
    output = models.forward_backward("a", data, "cross_entropy", {}, backward=False)
    logprobs = [torch.from_numpy(each).double().requires_grad_() for each in output.logprobs]
    torch.cat(logprobs).var().backward()
    linear = [
        Datum(input_ids=each.input_ids, targets=each.targets, inputs={"weights": -of.grad.numpy().astype(np.float32)})
        for each, of in zip(data, logprobs, strict=True)
    ]
    models.forward_backward("a", linear, "cross_entropy", {}, backward=True)

    def variance(leaves):
        return torch.cat([plain.target_logprobs(leaves, each) for each in data]).var()

    norm = plain.optimizer.step(find_gradients(plain.optimizer.parameters, variance), learning_rate=0.01)
    # The client has the logprobs and sends the weights in float32.
    assert models.optim_step("a", AdamParams(learning_rate=0.01))["grad_norm"] == pytest.approx(norm, rel=1e-5)


def save_after_a_step(models, folder, *, chunks):
    for chunk in chunks:
        models.forward_backward("a", chunk, "ppo", {}, backward=True)
    models.optim_step("a", AdamParams(learning_rate=0.05))
    models.save("a", folder, optimizer=False)
    return load_file(folder / "adapter_model.safetensors")


def test_gradients_of_uneven_chunks_add_up_to_those_of_one_call(folder, tmp_path):
    data = make_data("ppo", lengths=(5, 9, 1, 7, 12, 3))
    found = []
    for number, chunks in enumerate(([data], [data[:1], data[1:5], [], data[5:]])):
        models = open_model(folder)
        found.append(save_after_a_step(models, tmp_path / str(number), chunks=chunks))
    for name, weight in found[0].items():
        assert_close(found[1][name], weight, 1e-9)


def test_small_passes_and_padded_rows_change_nothing(folder, tmp_path):
    data = make_data("gspo", lengths=(5, 9, 1, 7, 12, 3))
    sums = []
    for tokens_per_pass in (None, 40, 12):
        models = open_model(folder, tokens_per_pass=tokens_per_pass)
        output = models.forward_backward("a", data, "gspo", {}, backward=True)
        sums.append((output.metrics["loss:sum"], models.optim_step("a", AdamParams())["grad_norm"]))
    for found in sums[1:]:
        assert found == pytest.approx(sums[0], rel=1e-9)


def test_a_forward_alone_adds_no_gradient(folder):
    models = open_model(folder)
    data = make_data("ppo")
    forward = models.forward_backward("a", data, "ppo", {}, backward=False)
    assert models.optim_step("a", AdamParams())["grad_norm"] == 0
    both = models.forward_backward("a", data, "ppo", {}, backward=True)
    assert forward.metrics == both.metrics
    for one, other in zip(forward.logprobs, both.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_positions_without_effect_have_logprobs_whatever_is_given_there(folder):
    """A ratio of e^100 at a prompt's position, and no trained position at all."""
    models = open_model(folder)
    datum = make_data("ppo", lengths=(6,))[0]
    inputs = {"advantages": np.zeros(6, np.float32), "logprobs": np.full(6, -1000, np.float32)}
    output = models.forward_backward(
        "a", [Datum(input_ids=datum.input_ids, targets=datum.targets, inputs=inputs)], "ppo", {}, backward=True
    )
    plain = models.forward_backward("a", [datum], "ppo", {}, backward=False)
    np.testing.assert_allclose(output.logprobs[0], plain.logprobs[0], rtol=1e-6)
    assert output.metrics == {"loss:sum": 0.0, "num_clipped:sum": 0.0, "num_loss_tokens:sum": 0.0}
    assert models.optim_step("a", AdamParams())["grad_norm"] == 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("name", "default"), [("weights", 1.0), ("clip_high_threshold", 1.2)])
def test_what_some_data_give_has_its_default_in_the_others(first, name, default, folder):
    models = open_model(folder)
    data = make_data("ppo", lengths=(5, 9))

    def give(n: int, value: float) -> Datum:
        return replace(data[n], inputs={**data[n].inputs, name: np.full(len(data[n].input_ids), value, np.float32)})

    some, all_of_them = [*data], [give(0, default), give(1, default)]
    some[first] = all_of_them[first] = give(first, 0.9)
    found = [models.forward_backward("a", each, "ppo", {}, backward=False).metrics for each in (some, all_of_them)]
    assert found[0] == pytest.approx(found[1], rel=1e-12)  # the sums of unlike data are added up


def test_a_call_without_data_has_a_sum_of_0(folder):
    models = open_model(folder)
    assert models.forward_backward("a", [], "ppo", {}, backward=True).metrics == {"loss:sum": 0.0}


def test_models_of_several_ranks_and_targets_train_apart(folder, tmp_path):
    """Interleaved calls leave each model what it is when it is trained alone; deleting one leaves the others."""
    configs = {
        "a": LoraConfig(rank=2, seed=1),
        "b": LoraConfig(rank=5, seed=1, train_mlp=False, train_unembed=False),
        "c": LoraConfig(rank=2, seed=2, train_attn=False),
    }
    alone = {}
    for name, config in configs.items():
        models = open_models(folder)
        models.create(name, config)
        for seed in (1, 2):
            models.forward_backward(name, make_data("ppo", seed=seed), "ppo", {}, backward=True)
            models.optim_step(name, AdamParams(learning_rate=0.01 * seed))
        models.save(name, tmp_path / f"alone-{name}", optimizer=True)
        alone[name] = load_file(tmp_path / f"alone-{name}" / "adapter_model.safetensors")
    together = open_models(folder)
    for name, config in configs.items():
        together.create(name, config)
    together.create("gone", LoraConfig(rank=1))
    for seed in (1, 2):
        for name in configs:
            together.forward_backward(name, make_data("ppo", seed=seed), "ppo", {}, backward=True)
        for name in reversed(configs):
            together.optim_step(name, AdamParams(learning_rate=0.01 * seed))
        if seed == 1:
            together.delete("gone")
    for name in configs:
        together.save(name, tmp_path / name, optimizer=True)
        found = load_file(tmp_path / name / "adapter_model.safetensors")
        assert found.keys() == alone[name].keys()
        assert all(torch.equal(found[key], alone[name][key]) for key in found)
    kinds = {name: {key.split(".")[-3] for key in weights} for name, weights in alone.items()}
    assert kinds["a"] == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert kinds["b"] == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert kinds["c"] == {"gate_proj", "up_proj", "down_proj", "lm_head"}


def test_a_seed_decides_the_first_weights(folder, tmp_path):
    models = open_models(folder, dtype=None)
    for name, seed in (("a", 5), ("b", 5), ("c", 6), ("d", None), ("e", None)):
        torch.rand(3)  # of another thread
        models.create(name, LoraConfig(rank=2, seed=seed))
        models.save(name, tmp_path / name, optimizer=False)
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    a, b, c, d, e = (load_file(tmp_path / name / "adapter_model.safetensors")[key] for name in "abcde")
    assert torch.equal(a, b)
    for one, other in ((a, c), (a, d), (d, e)):
        assert not torch.equal(one, other)
    assert float(a.abs().max()) <= 1 / math.sqrt(a.shape[1])


def test_a_saved_model_continues_bit_for_bit(folder, tmp_path):
    def step(models, seed):
        models.forward_backward("a", make_data("ppo", seed=seed), "ppo", {}, backward=True)
        return models.optim_step("a", AdamParams(learning_rate=0.01))

    models = open_model(folder, dtype=None)
    step(models, 1)
    models.save("a", tmp_path / "1", optimizer=True)
    metrics = step(models, 2)
    models.save("a", tmp_path / "2", optimizer=True)
    again = open_models(folder, dtype=None)
    again.create("a", LoraConfig(rank=3))
    again.forward_backward("a", make_data("ppo", seed=9), "ppo", {}, backward=True)  # a gradient of other weights
    again.load("a", tmp_path / "1", optimizer=True)
    assert step(again, 2) == metrics
    again.save("a", tmp_path / "again", optimizer=True)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    again.load("a", tmp_path / "1", optimizer=False)
    assert step(again, 2)["num_steps"] == 1
    again.save("a", tmp_path / "anew", optimizer=False)
    other = (tmp_path / "anew" / "adapter_model.safetensors").read_bytes()
    assert other != (tmp_path / "2" / "adapter_model.safetensors").read_bytes()


def test_a_saved_adapter_is_one_of_peft(folder, tmp_path):
    models = open_model(folder, dtype=None)
    data = make_data("cross_entropy")
    train(models, data, learning_rate=0.05)
    models.save("a", tmp_path / "saved", optimizer=False)
    expected = models.forward_backward("a", data[:1], "cross_entropy", {}, backward=False).logprobs[0]
    model = peft.PeftModel.from_pretrained(untied_qwen3(), tmp_path / "saved").eval()
    with torch.no_grad():
        logits_TV = model(torch.from_numpy(data[0].input_ids).long()[None]).logits[0]
    found = logits_TV.log_softmax(-1).gather(-1, torch.from_numpy(data[0].targets)[:, None])[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["lora_alpha"] == 32


def test_an_engine_gets_the_adapter_as_it_is_now(folder):
    models = open_model(folder, dtype=None)
    train(models, make_data("cross_entropy"), learning_rate=0.05)
    first = copy_weights(models)
    assert "model.layers.0.mlp.up_proj.lora_B.weight" in first
    train(models, make_data("cross_entropy"), learning_rate=0.05)
    second = copy_weights(models)
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_all_weights_of_one_model_can_be_trained(folder, tmp_path):
    """Beside no adapter; saved and loaded with its averages; the base is as it was for what comes after it."""
    models = open_models(folder, dtype=None)
    assert models.create("a", None) is None
    data = make_data("cross_entropy")
    first = train(models, data, learning_rate=0.01)
    models.save("a", tmp_path / "1", optimizer=True)
    second = train(models, data, learning_rate=0.01)
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"]
    expected = copy_weights(models)
    assert "model.embed_tokens.weight" in expected
    models.load("a", tmp_path / "1", optimizer=True)
    assert train(models, data, learning_rate=0.01).metrics == second.metrics
    assert all(torch.equal(tensor, expected[name]) for name, tensor in models.adapter("a"))
    with pytest.raises(InvalidInputError, match=r"'b': one that trains all weights .rank 0. is alone on the base"):
        models.create("b", ADAPTER)
    place = dict(models.adapter("a"))["lm_head.weight"].data_ptr()
    parameters = (each for each in gc.get_objects() if type(each) is torch.nn.Parameter)
    trained = weakref.ref(next(each for each in parameters if each.data_ptr() == place))
    del parameters
    models.delete("a")
    models.create("b", ADAPTER)
    fresh = models.forward_backward("b", data, "cross_entropy", {}, backward=False)
    assert fresh.metrics["loss:sum"] == pytest.approx(first.metrics["loss:sum"], rel=1e-5)
    gc.collect()
    assert trained() is None, "the base that was trained is gone"
    with pytest.raises(InvalidInputError, match=r"'c': one that trains all weights .rank 0. is alone on the base"):
        models.create("c", None)


def test_tied_embeddings_get_no_adapter(tied_folder):
    models = open_models(tied_folder, dtype=None)
    assert models.create("a", LoraConfig(rank=2)) == LoraConfig(rank=2, train_unembed=False)
    assert not any("lm_head" in name or "embed" in name for name, _ in models.adapter("a"))
    with pytest.raises(InvalidInputError, match="train_unembed must be False for Qwen3ForCausalLM, which has no"):
        models.create("b", LoraConfig(rank=2, train_mlp=False, train_attn=False))


def test_a_gradient_that_is_not_finite_is_refused_and_cleared(folder, tmp_path):
    models = open_model(folder, dtype=None)
    models.save("a", tmp_path / "before", optimizer=False)
    datum = make_data("importance_sampling", lengths=(4,))[0]
    huge = {"advantages": np.full(4, 3e38, np.float32), "logprobs": np.full(4, -80, np.float32)}
    wrong = Datum(input_ids=datum.input_ids, targets=datum.targets, inputs=huge)
    models.forward_backward("a", [wrong], "importance_sampling", {}, backward=True)
    with pytest.raises(TrainingError, match="the gradient's norm is"):
        models.optim_step("a", AdamParams())
    assert models.optim_step("a", AdamParams())["grad_norm"] == 0
    models.save("a", tmp_path / "after", optimizer=False)
    names = [tmp_path / part / "adapter_model.safetensors" for part in ("before", "after")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_a_step_that_makes_weights_that_are_not_finite_is_an_error_until_others_are_loaded(folder, tmp_path):
    models = open_model(folder, dtype=None)
    models.save("a", tmp_path / "good", optimizer=True)
    huge = AdamParams(learning_rate=1e12, weight_decay=1e12)
    models.optim_step("a", huge)  # each step makes the weights 1e24 times larger
    for params in (huge, AdamParams()):
        with pytest.raises(TrainingError, match="made weights that are not finite: load a checkpoint"):
            models.optim_step("a", params)
    with pytest.raises(TrainingError, match="nothing is saved of weights that are not finite: load a checkpoint"):
        models.adapter("a")
    models.load("a", tmp_path / "good", optimizer=True)
    models.optim_step("a", AdamParams())
    for name, least in (("learning_rate", "0"), ("eps", "1e-20"), ("weight_decay", "0")):
        with pytest.raises(InvalidInputError, match=rf"adam_params.{name} must lie in \[{least}, 1e12\]"):
            models.optim_step("a", AdamParams(**{name: 1e300}))


def test_folders_of_other_models_are_refused(folder, tied_folder, tmp_path):
    models = open_model(folder, dtype=None)
    models.save("a", tmp_path / "saved", optimizer=False)
    models.create("b", LoraConfig(rank=4, train_mlp=False))
    text = r"it has LoraConfig\(rank=3, .* train_mlp=True, .*, and the model LoraConfig\(rank=4, .* train_mlp=False"
    with pytest.raises(CheckpointError, match=text):
        models.load("b", tmp_path / "saved", optimizer=False)
    with pytest.raises(CheckpointError, match="was saved without the optimizer's state"):
        models.load("a", tmp_path / "saved", optimizer=True)
    with pytest.raises(CheckpointError, match="must hold a whole saved model: FileNotFoundError"):
        models.load("a", tmp_path / "nothing", optimizer=False)
    other = open_models(tied_folder, dtype=None)
    other.create("a", LoraConfig(rank=3, train_unembed=False))
    models.create("c", LoraConfig(rank=3, train_unembed=False))
    models.save("c", tmp_path / "of-other-base", optimizer=False)
    with pytest.raises(CheckpointError, match="is of an adapter on weights with the checksum"):
        other.load("a", tmp_path / "of-other-base", optimizer=False)
    file = tmp_path / "saved" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"WeightsError: weight file .*adapter_model.safetensors must have"):
        models.load("a", tmp_path / "saved", optimizer=False)


def test_a_model_that_is_gone_is_named(folder):
    models = open_models(folder)
    with pytest.raises(InvalidInputError, match="there is no model 'a': it was deleted, or never created here"):
        models.optim_step("a", AdamParams())
    models.create("a", ADAPTER)
    models.delete("a")
    with pytest.raises(InvalidInputError, match="there is no model 'a'"):
        models.optim_step("a", AdamParams())
    models.create("b", ADAPTER)
    assert models.optim_step("b", AdamParams())["num_steps"] == 1


@pytest.mark.parametrize(
    ("architecture", "attention", "others"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}),
        ("gpt_neox", {"query_key_value", "dense"}, {"dense_h_to_4h", "dense_4h_to_h"}),
    ],
)
def test_layers_of_other_architectures_are_found_by_their_place(architecture, attention, others):
    model = tiny_model(architecture)
    parts = {}
    for part in ("train_attn", "train_mlp"):
        chosen = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False) | {part: True}
        spec, modules = find_modules(model, LoraConfig(rank=1, **chosen))
        assert spec == LoraConfig(rank=1, **chosen)
        parts[part] = {name.split(".")[-1] for name in modules}
    assert parts == {"train_attn": attention, "train_mlp": others}


def test_experts_of_one_tensor_get_no_adapter_and_routers_neither():
    model = tiny_model("qwen3_moe")
    with pytest.raises(InvalidInputError, match=r"train_mlp must be False for Qwen3MoeForCausalLM, .*experts"):
        find_modules(model, LoraConfig(rank=1))
    _, modules = find_modules(model, LoraConfig(rank=1, train_mlp=False, train_unembed=False))
    assert {name.split(".")[-1] for name in modules} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_whole_model_of_other_shapes_or_of_an_adapter_is_refused(folder, tied_folder, tmp_path):
    models = open_models(folder, dtype=None)
    models.create("a", None)
    models.save("a", tmp_path / "whole", optimizer=False)
    other = open_models(tied_folder, dtype=None)
    other.create("a", None)
    with pytest.raises(CheckpointError, match=r"must have the weights of this model, and differs in lm_head.weight"):
        other.load("a", tmp_path / "whole", optimizer=False)
    other.delete("a")
    other.create("a", LoraConfig(rank=1))
    with pytest.raises(
        CheckpointError, match=r"all its weights are trained.* it has None, and the model LoraConfig.rank=1"
    ):
        other.load("a", tmp_path / "whole", optimizer=False)


def test_a_base_that_is_no_model_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match="model must be a folder or the hub's name of a causal language model"):
        open_models(tmp_path).create("a", ADAPTER)


def test_layers_that_are_not_linear_are_refused():
    with pytest.raises(InvalidInputError, match="train_attn must be False for GPT2LMHeadModel, which has no linear"):
        find_modules(tiny_model("gpt2"), LoraConfig(rank=1))


@pytest.mark.parametrize("way", ["fork", pytest.param("spawn", marks=pytest.mark.e2e)])
def test_a_process_of_its_own_trains_bit_for_bit_and_its_end_is_an_error(folder, tmp_path, monkeypatch, way):
    """A fork has torch at hand; otherwise it is the same process."""
    context = multiprocessing.get_context(way)
    monkeypatch.setattr(models, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
    here, there = open_models(folder, dtype=None), TrainerProcess(folder, "")
    data = make_data("ppo")
    outputs = []
    for name, own in (("here", here), ("there", there)):
        assert own.run(methodcaller("create", "a", ADAPTER)) == ADAPTER
        outputs.append(own.run(methodcaller("forward_backward", "a", data, "ppo", {}, True)))
        assert own.run(methodcaller("optim_step", "a", AdamParams(learning_rate=0.01)))["num_steps"] == 1
        own.run(methodcaller("save", "a", tmp_path / name, True))
    assert outputs[0].metrics == outputs[1].metrics
    for one, other in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
        np.testing.assert_array_equal(one, other)
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "here" / file).read_bytes() == (tmp_path / "there" / file).read_bytes()
    with pytest.raises(InvalidInputError, match="there is no model 'b'"):
        there.run(methodcaller("optim_step", "b", AdamParams()))
    with pytest.raises(RuntimeError, match="AttributeError: 'Models' object has no attribute 'x'"):
        there.run(attrgetter("x"))
    there.process.kill()
    for _ in range(2):
        with pytest.raises(EngineError, match=r"the trainer's process has ended .exit code -9. with all its models"):
            there.run(methodcaller("optim_step", "a", AdamParams()))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LoraConfig(rank=0), r"lora_config.rank must be in \[1, 512\], got 0"),
        (LoraConfig(rank=1, seed=-1), r"lora_config.seed must be in \[0, 2\^63\), got -1"),
        (LoraConfig(rank=1, train_mlp=False, train_attn=False, train_unembed=False), "must train mlp, attn or"),
        (AdamParams(learning_rate=math.nan), r"learning_rate must lie in \[0, 1e12\], got nan"),
        (AdamParams(beta2=1.0), r"adam_params.beta2 must lie in \[0, 1\), got 1.0"),
        (AdamParams(eps=0.0), r"adam_params.eps must lie in \[1e-20, 1e12\], got 0.0"),
        (AdamParams(eps=1e-50), r"adam_params.eps must lie in \[1e-20, 1e12\], got 1e-50"),
        (AdamParams(grad_clip_norm=-1.0), r"grad_clip_norm must lie in \[0, 1e12\], got -1.0"),
    ],
)
def test_configs_are_checked_before_anything_is_done(config, text, folder):
    method = "create" if isinstance(config, LoraConfig) else "optim_step"
    with pytest.raises(InvalidInputError, match=text):
        getattr(open_models(folder), method)("a", config)
