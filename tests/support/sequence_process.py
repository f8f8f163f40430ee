"""One of several processes that share the ids of each lane: each case is compared with the same pass in one process."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model

from support.models import random_qwen3
from unbroken.errors import InvalidInputError
from unbroken.routing import Routers
from unbroken.training.config import SharedPrefixes
from unbroken.training.model.backbone import enable_checkpointing
from unbroken.training.model.lanes import RowLayout
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.scores import Entropy, KeptTokens
from unbroken.training.model.sequence import SequenceGroup, split_lanes
from unbroken.training.model.tree import merge_rows, pick_nodes
from unbroken.training.model.varlen import attention_by_rows
from unbroken.types import KeptIds

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROWS = [np.arange(1, 1 + n, dtype=np.int32) * 7 % 61 for n in (13, 8, 5)]
SHARED = [np.concatenate([ROWS[0][:7], ROWS[k][:3] + 1]) for k in range(3)] + [ROWS[1]]
Given = tuple[Any, ...]


def padded(_: PolicyLogprobs) -> Given:
    """Three lanes of one row each, with ids at the end that nobody needs."""
    ids_BT, mask_BT = torch.zeros(3, 13, dtype=torch.int64), torch.zeros(3, 13, dtype=torch.bool)
    for lane, row in enumerate(ROWS):
        ids_BT[lane, : len(row)], mask_BT[lane, 1 + lane : len(row)] = torch.from_numpy(row), True
    return ids_BT, mask_BT, 0.7, None, None, Entropy.TRAINED


def idle(_: PolicyLogprobs) -> Given:
    """Two ids and no loss token."""
    return torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.bool), 1.0, None, None, Entropy.TRAINED


def last_ids(_: PolicyLogprobs) -> Given:
    """One row, of whose loss tokens one process has all."""
    ids_BT = torch.from_numpy(ROWS[0])[None].long()
    return ids_BT, torch.arange(13)[None] > 10, 1.0, None, None, Entropy.TRAINED


def packed(_: PolicyLogprobs) -> Given:
    """Rows that share the lanes."""
    ids_BT = torch.from_numpy(np.stack([np.concatenate([ROWS[1], ROWS[2]]), ROWS[0]])).long()
    positions_BT = torch.stack([torch.cat([torch.arange(8), torch.arange(5)]), torch.arange(13)])
    return ids_BT, positions_BT > 0, 1.0, None, positions_BT, Entropy.TRAINED


def by_rows(policy: PolicyLogprobs) -> Given:
    """All rows in one lane, by their borders."""
    with attention_by_rows(policy.causal) as keep:
        keep()
    policy.layout = RowLayout.BY_ROWS
    positions_BT = torch.cat([torch.arange(len(row)) for row in ROWS])[None]
    ids_BT = torch.from_numpy(np.concatenate(ROWS))[None].long()
    return ids_BT, positions_BT > 0, 1.0, None, positions_BT, Entropy.TRAINED


def tree(policy: PolicyLogprobs) -> Given:
    """Rows that share the ids that they begin with."""
    policy.allow_trees()
    assert policy.tree_mask is not None
    merged = merge_rows(SHARED)
    ids_BT = torch.from_numpy(merged.token_ids_T.astype(np.int64))[None]
    depths_BT = torch.from_numpy(merged.depths_T)[None]
    inputs, _ = pick_nodes(merged, SHARED, [np.arange(len(row)) > 0 for row in SHARED])
    no_mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    return ids_BT, no_mask_BT, 1.0, None, depths_BT, Entropy.TRAINED, None, inputs


def replayed(_: PolicyLogprobs) -> Given:
    """Rows with recorded experts, of which choices are counted too."""
    ids_BT, mask_BT, *_ = given = padded(_)
    experts_BTLK = torch.randint(0, 4, (*ids_BT.shape, 2, 1), generator=torch.Generator().manual_seed(0))
    experts_BTLK = torch.cat([experts_BTLK, (experts_BTLK + 1) % 4], -1).to(torch.int16)
    experts_BTLK[1, 4:] = -1
    return *given[:6], experts_BTLK, None, mask_BT


def kept(_: PolicyLogprobs) -> Given:
    """Rows of which some ids were kept among few."""
    ids_BT, mask_BT, *_ = given = padded(_)
    rng = np.random.default_rng(0)
    targets = ids_BT[mask_BT].tolist()
    sets = [np.union1d(rng.integers(0, 64, 9), [target]) if rng.random() < 0.7 else [] for target in targets]
    tokens = KeptTokens.of(KeptIds.of([np.asarray(each, dtype=np.int64) for each in sets]), torch.device("cpu"))
    return *given, None, None, None, tokens


def qwen3(**sizes: Any) -> Any:
    return random_qwen3(**SIZES | {"max_position_embeddings": 512} | sizes)


def lora() -> Any:
    torch.manual_seed(0)
    model = get_peft_model(qwen3(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def moe() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, **NO_IDS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    )
    return transformers.Qwen3MoeForCausalLM(config)


def checkpointed() -> Any:
    model = qwen3()
    enable_checkpointing(model)
    return model


def llama() -> Any:
    """As many heads of keys as others."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 8}, **NO_IDS)
    return transformers.LlamaForCausalLM(config)


CASES: dict[str, tuple[Callable[[], Any], Callable[[PolicyLogprobs], Given]]] = {
    "padded": (qwen3, padded),
    "idle": (qwen3, idle),
    "last_ids": (qwen3, last_ids),
    "kept": (qwen3, kept),
    "packed": (qwen3, packed),
    "by_rows": (qwen3, by_rows),
    "tree": (qwen3, tree),
    "checkpointed": (checkpointed, packed),
    "checkpointed_tree": (checkpointed, tree),
    "checkpointed_by_rows": (checkpointed, by_rows),
    "lora": (lora, packed),
    "llama": (llama, padded),
    "moe": (moe, replayed),
}


def make_policy(model: Any, give: Callable[[PolicyLogprobs], Given]) -> PolicyLogprobs:
    is_replayed = give is replayed
    routers = Routers.find(model) if is_replayed else None
    if is_replayed:
        enable_checkpointing(model, routers=routers)
    shared = SharedPrefixes.ALWAYS if give is tree else SharedPrefixes.NEVER
    return PolicyLogprobs(model, chunk_size=3, routers=routers, shared_prefixes=shared)


def train(policy: PolicyLogprobs, given: Given) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Three updates; the scores and gradients of the first pass, and the weights of the end."""
    trained = {name: each for name, each in policy.named_parameters() if each.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.05)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        optimizer.zero_grad()
        scores = policy(*given)
        weights_N = torch.linspace(-1, 1, len(scores.logprobs_N))
        loss = (weights_N * scores.logprobs_N).sum() - 0.1 * scores.entropies_N.sum()
        if scores.choices_2E is not None:
            loss = loss + 0.01 * (torch.arange(4.0) * scores.choices_2E[1]).sum()
        loss.backward()
        choices_2E = None if scores.choices_2E is None else scores.choices_2E.detach()
        if policy.sequence is not None:
            for each in trained.values():
                dist.all_reduce(each.grad, group=policy.sequence.group)
            if choices_2E is not None:
                dist.all_reduce(choices_2E, group=policy.sequence.group)
        if step == 0:
            found |= {"logprobs": scores.logprobs_N.detach(), "entropies": scores.entropies_N.detach()}
            found |= {} if choices_2E is None else {"choices": choices_2E}
            found |= {f"gradient of {name}": each.grad.clone() for name, each in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    return found, {name: each.detach() for name, each in trained.items()}


def compare(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest of all numbers of its kind; without numbers there is none."""
    assert expected.keys() == found.keys()
    assert all(tensor.shape == found[name].shape for name, tensor in expected.items())
    scale = max((float(each.abs().max()) for each in expected.values() if each.numel()), default=1.0)
    offs = [float((each - found[name]).abs().max()) for name, each in expected.items() if each.numel()]
    return max(offs, default=0.0) / max(scale, 1e-3)


def run(name: str, group: SequenceGroup) -> dict[str, float]:
    make_model, give = CASES[name]
    results = []
    for sequence in (None, group):
        policy = make_policy(make_model(), give)
        if sequence is not None:
            split_lanes(policy, sequence)
        results.append(train(policy, give(policy)))
    (first, weights), (split, split_weights) = results
    gradients = [{k: v for k, v in each.items() if k.startswith("gradient")} for each in (first, split)]
    scores = [{k: v for k, v in each.items() if not k.startswith("gradient")} for each in (first, split)]
    untrained = {name: each.detach() for name, each in make_policy(make_model(), give).named_parameters()}
    moved = max(float((weight - untrained[name]).abs().max()) for name, weight in weights.items())
    off = {"scores": compare(*scores), "gradients": compare(*gradients), "weights": compare(weights, split_weights)}
    return off | {"moved": moved, "num_scores": len(first["logprobs"])}


def refuse(sizes: dict[str, Any], group: SequenceGroup) -> str:
    """Why a model is refused."""
    model = sizes.pop("model", qwen3)(**sizes)
    policy = PolicyLogprobs(model, chunk_size=3)
    try:
        split_lanes(policy, group)
    except InvalidInputError as error:
        assert policy.sequence is None
        return str(error)
    return ""


def loses_exchange() -> Any:
    """A model that does not hand its attention what it is given."""
    model = qwen3()
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *a, exchange=None, _forward=forward, **options: _forward(*a, **options)
    return model


def windows() -> Any:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, **NO_IDS, sliding_window=4)
    return transformers.MistralForCausalLM(config)


def eager() -> Any:
    model = qwen3()
    model.set_attn_implementation("eager")
    return model


def mamba() -> Any:
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=2, **NO_IDS
    )
    return transformers.Mamba2ForCausalLM(config)


REFUSED = {
    "heads": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "windows": {"model": windows},
    "eager": {"model": eager},
    "loses_exchange": {"model": loses_exchange},
    "mamba": {"model": mamba},
}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    group = SequenceGroup(dist.group.WORLD)
    found: dict[str, Any] = {name: run(name, group) for name in CASES}
    found |= {f"refused {name}": refuse(copy.copy(sizes), group) for name, sizes in REFUSED.items()}
    (folder / f"found-{group.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
