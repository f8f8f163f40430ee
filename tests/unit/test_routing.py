"""Routers of transformers: what they choose is recorded, and replayed with live gates and their gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from support.architectures import tiny_model
from unbroken.errors import InvalidInputError, InvariantError
from unbroken.routing import LIVE, Routers

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "num_experts_per_tok": 2,
}
_HEADS = {**_SIZES, "head_dim": 8}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GROUPS = {
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
FAMILIES = {
    "Qwen3MoeConfig": ({**_HEADS, "num_experts": 6, "moe_intermediate_size": 16}, (0, 1)),
    "MixtralConfig": ({**_SIZES, "num_local_experts": 6}, (0, 1)),
    "OlmoeConfig": ({**_SIZES, "num_experts": 6}, (0, 1)),
    "DeepseekV3Config": ({**_LATENT, **_GROUPS}, (1,)),
    "Glm4MoeConfig": ({**_HEADS, **_GROUPS}, (1,)),
    "GptOssConfig": ({**_HEADS, "num_local_experts": 6}, (0, 1)),
    "GraniteMoeConfig": ({**_SIZES, "num_local_experts": 6}, (0, 1)),
    "MiniMaxM2Config": ({**_HEADS, "num_local_experts": 6}, (0, 1)),
    "Llama4TextConfig": (
        {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64},
        (0, 1),
    ),
}
IDS_BT = torch.arange(1, 11).reshape(2, 5)


def build(family: str) -> Any:
    sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, family)(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()


def run(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=IDS_BT, use_cache=False).logits
    return logits


def record(model: Any, routers: Routers) -> torch.Tensor:
    with routers.recording() as chosen, torch.no_grad():
        run(model)
    return routers.stack(chosen)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_that_a_family_chose_give_the_same_states_and_gradients_and_others_do_not(family):
    model = build(family)
    routers = Routers.find(model)
    assert routers.layers == FAMILIES[family][1]
    live_NLK = record(model, routers)
    expected = run(model)
    expected.square().sum().backward()
    expected_gradients = gradients(model)
    with routers.replaying(live_NLK.flip(-1)):  # in any order
        found = run(model)
    found.square().sum().backward()
    found_gradients = gradients(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        scale = float(gradient.abs().max().clamp(min=1.0))
        assert float((found_gradients[name] - gradient).abs().max()) <= 1e-10 * scale, name
    counts = routers.take_counts()
    assert (counts.num_replayed, counts.num_different) == (10 * len(routers.layers), 0)
    with routers.replaying((live_NLK + 1) % routers.num_experts), torch.no_grad():
        assert not torch.allclose(run(model), expected)
    assert routers.take_counts().num_different > 0
    assert routers.take_counts().num_replayed == 0


def test_gates_are_the_models_own_function_of_live_scores():
    model = tiny_model("qwen3_moe")
    routers = Routers.find(model)
    router = model.model.layers[0].mlp.gate.double()
    hidden_ND = torch.randn(10, 32, dtype=torch.float64)
    experts_NLK = torch.zeros(10, 2, 2, dtype=torch.int16)
    experts_NLK[:, 0] = torch.tensor([6, 1])
    with routers.replaying(experts_NLK):
        _, gates_NK, indices_NK = router(hidden_ND)
    scores_NK = torch.softmax(hidden_ND @ router.weight.T, -1, dtype=torch.float)[:, [6, 1]]
    assert (indices_NK == torch.tensor([6, 1])).all()
    torch.testing.assert_close(gates_NK, (scores_NK / scores_NK.sum(-1, keepdim=True)).double())
    assert gates_NK.requires_grad


def test_ids_without_experts_take_those_that_the_router_chooses():
    model = tiny_model("qwen3_moe")
    routers = Routers.find(model)
    expected = run(model)
    live_NLK = record(model, routers)
    experts_NLK = live_NLK.clone()
    experts_NLK[:3] = LIVE
    with routers.replaying(experts_NLK):
        assert torch.equal(run(model), expected)
    assert routers.take_counts().num_replayed == 7 * 2


def test_a_layer_that_is_computed_again_takes_the_experts_of_its_pass():
    """Gradient checkpointing: the backward pass comes when another pass was made, or none is in the block."""
    model = tiny_model("qwen3_moe")
    routers = Routers.find(model)
    router = model.model.layers[0].mlp.gate.double()
    hidden_ND = torch.randn(10, 32, dtype=torch.float64, requires_grad=True)
    experts_NLK = torch.tensor([5, 2], dtype=torch.int16).expand(10, 2, 2)

    def compute() -> torch.Tensor:
        return router(hidden_ND)[1][:, 0].square().sum()

    with routers.replaying(experts_NLK):
        compute().backward()
        expected, hidden_ND.grad = hidden_ND.grad, None
        again = checkpoint(
            lambda _: compute(), hidden_ND, use_reentrant=False, context_fn=routers.make_checkpoint_contexts
        )
    routers.take_counts()
    again.backward()
    torch.testing.assert_close(hidden_ND.grad, expected)
    assert routers.take_counts().num_replayed == 0, "what is computed again is not counted again"


def test_a_model_whose_routers_cannot_be_replayed_is_refused_by_name():
    with pytest.raises(InvalidInputError, match="Qwen3ForCausalLM has no routers"):
        Routers.find(tiny_model("qwen3"))
    config = transformers.PhimoeConfig(**{**_SIZES, "num_local_experts": 6})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InvalidInputError, match="routers of PhimoeForCausalLM cannot be replayed"):
        Routers.find(model)


def test_experts_of_another_model_or_of_other_ids_are_refused():
    model = tiny_model("qwen3_moe")
    routers = Routers.find(model)
    with (
        pytest.raises(InvariantError, match=r"shape \[N, 2, 2\], got \(10, 3, 2\)"),
        routers.replaying(torch.zeros(10, 3, 2, dtype=torch.int16)),
    ):
        run(model)
    with (
        pytest.raises(InvariantError, match="chooses for 10 ids, and there are experts of 9"),
        routers.replaying(torch.zeros(9, 2, 2, dtype=torch.int16)),
    ):
        run(model)
    assert torch.equal(run(model), run(model)), "and the hooks are left"


def test_a_copy_of_the_model_has_no_part_in_the_replay():
    """An engine's copy of a trained model samples while the trainer replays."""
    model = tiny_model("qwen3_moe")
    routers = Routers.find(model)
    copied = copy.deepcopy(model)
    expected = run(model)
    other_NLK = (record(model, routers) + 1) % 8
    with routers.replaying(other_NLK):
        assert torch.equal(run(copied), expected)
        assert not torch.equal(run(model), expected)
