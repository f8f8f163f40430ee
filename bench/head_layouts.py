"""Whether vLLM samples from the weights it loaded: head layouts of real models by ways of making CUDA graphs.

    python bench/head_layouts.py                                        # one Hopper GPU, about 6 minutes with 16 cores
    python bench/head_layouts.py --layouts 9/3x64,16/8x128 --ways vllm,full --jobs 2
    python bench/head_layouts.py --model FOLDER --ways all              # a model with its own weights
    VLLM_CPU_KVCACHE_SPACE=1 python bench/head_layouts.py --layouts 9/3x64 --ways eager --jobs 1     # a CPU

Plain vLLM, and nothing of ours: each case is a process with an offline `LLM`. Its sampled logprobs are compared with
those of transformers in float32, for requests that begin at once (`batch`), that come one after the other while others
are sampled (`coming`, so steps are mixed), and that are alone. Models have two layers of random weights, as large as
makes attention matter; a model of which a wrong step cannot be seen shows nothing. k3 is about 1e-5 to 1e-3 for
bfloat16, and above 0.1 where other keys or queries were read than the request's own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 2048
LONGEST = 2048
LAYOUTS: dict[str, dict[str, Any]] = {
    "9/3x64": {"kind": "llama", "tied": True},
    "15/5x64": {"kind": "llama", "tied": True},
    "14/2x64": {"kind": "qwen2", "tied": True},
    "32/8x64": {"kind": "llama", "tied": True},
    "12/2x128": {"kind": "qwen2", "tied": True},
    "16/2x128": {"kind": "qwen2", "tied": True},
    "28/4x128": {"kind": "qwen2", "tied": False},
    "24/8x128": {"kind": "llama", "tied": True},
    "40/8x128": {"kind": "qwen3", "tied": False},
    "16/8x128": {"kind": "qwen3", "tied": True},
    "32/32x96": {"kind": "llama", "tied": False},
    "8/1x256": {"kind": "llama", "tied": True},
}
"""Query heads / key heads x their size: SmolLM2 135M and 360M, Qwen2.5 0.5B, Llama 3.2 1B, Qwen2.5 1.5B, 3B and 7B,
Llama 3.2 3B, Qwen3 14B and 0.6B, Phi 3 mini, Gemma 2B (whose own scale of embeddings would hide its layers, so it is a
Llama here). Qwen2's have biases."""
FULL = {"cudagraph_mode": "FULL", "max_cudagraph_capture_size": 1024}
WAYS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "full": {"compilation_config": FULL},
    "full-512": {"compilation_config": {**FULL, "max_cudagraph_capture_size": 512}},
    "full-not-compiled": {"compilation_config": {**FULL, "mode": 0}},
    "full-one-split": {"compilation_config": FULL, "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1}},
    "full-no-cache": {"compilation_config": FULL, "enable_prefix_caching": False},
    "full-whole-prompts": {
        "compilation_config": FULL,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 32768,
    },
    "full-256-seqs": {"compilation_config": FULL, "max_num_seqs": 256},
    "decode-only": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    "piecewise-1024": {"compilation_config": {**FULL, "cudagraph_mode": "FULL_AND_PIECEWISE"}},
    "eager": {"enforce_eager": True},
}


def save_model(layout: str, folder: Path) -> None:
    """Write a model of two layers with random weights of a size at which attention matters."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    heads, size = layout.split("x")
    num_heads, num_key_heads = (int(number) for number in heads.split("/"))
    config = AutoConfig.for_model(
        LAYOUTS[layout]["kind"],
        num_hidden_layers=2,
        hidden_size=num_heads * int(size),
        intermediate_size=1024,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_heads,
        head_dim=int(size),
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=LAYOUTS[layout]["tied"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * (0.5 if name.endswith("bias") else 0.1))
            else:
                gain = 1.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                weight.normal_(
                    0, gain * (2.0 if "embed" in name or "lm_head" in name else 1.0) / weight.shape[1] ** 0.5
                )
    model.to(torch.bfloat16).save_pretrained(folder)


def draw_requests(rng: np.random.Generator, number: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """Prompts of 1 to 1,000 ids, evenly over their magnitudes, with how many ids to sample."""
    lengths = np.exp(rng.uniform(0, math.log(1000), number)).round().astype(int).clip(1, 1000)
    counts = rng.geometric(1 / 24, number).clip(1, 128)
    return [
        (rng.integers(3, vocab_size, length).tolist(), int(count))
        for length, count in zip(lengths, counts, strict=True)
    ]


def sample(llm: Any, requests: list[tuple[list[int], int]], way: str, per_step: float) -> list[dict[str, Any]]:
    """Sample all requests, which come by `per_step` for each step of the engine on average, or all at once."""
    from vllm import SamplingParams

    rng, waiting, found = np.random.default_rng(1), list(enumerate(requests)), []
    while waiting or llm.llm_engine.has_unfinished_requests():
        num_new = int(rng.poisson(per_step)) if math.isfinite(per_step) else len(waiting)
        for number, (prompt, count) in waiting[:num_new]:
            params = SamplingParams(max_tokens=count, temperature=1.0, logprobs=0, ignore_eos=True)
            llm.llm_engine.add_request(f"{way}-{number}", {"prompt_token_ids": prompt}, params)
        waiting = waiting[num_new:]
        for output in llm.llm_engine.step():
            if output.finished:
                (completion,) = output.outputs
                ids = list(completion.token_ids)
                logprobs = [each[number].logprob for each, number in zip(completion.logprobs, ids, strict=True)]
                found.append({"prompt": output.prompt_token_ids, "ids": ids, "logprobs": logprobs})
    return found


def compare(folder: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sampled logprobs against those of transformers in float32."""
    import torch
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    differences = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row["prompt"], *row["ids"]]], device=device)
            logits = model(ids, logits_to_keep=len(row["ids"]) + 1).logits[0, :-1].float()
            own = logits.log_softmax(-1).gather(1, ids[0, -len(row["ids"]) :, None])[:, 0].cpu().numpy()
            differences.append(own.astype(np.float64) - np.array(row["logprobs"]))
    log_ratio = np.concatenate(differences)
    return {
        "ids": len(log_ratio),
        "k3": float(np.mean(np.expm1(np.minimum(log_ratio, 50)) - log_ratio)),
        "largest": float(np.abs(log_ratio).max()),
        "off_20pct": float(np.mean(np.abs(np.expm1(np.minimum(log_ratio, 50))) > 0.2)),
    }


def measure(folder: str, way: str) -> dict[str, Any]:
    """Sample by vLLM and compare; in a process of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm
    from vllm import LLM

    started = time.perf_counter()
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": LONGEST, "skip_tokenizer_init": True}
    if torch.cuda.is_available():
        options |= {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05}
    llm = LLM(folder, seed=0, logprobs_mode="processed_logprobs", disable_log_stats=True, **options, **WAYS[way])
    start_s = time.perf_counter() - started
    vocab_size, rng = llm.llm_engine.model_config.get_vocab_size(), np.random.default_rng(0)
    found = {
        "batch": sample(llm, draw_requests(rng, 256, vocab_size), "batch", math.inf),
        "coming": sample(llm, draw_requests(rng, 160, vocab_size), "coming", 2.0),
        "alone": [
            sample(llm, [each], f"alone-{number}", math.inf)[0]
            for number, each in enumerate(draw_requests(rng, 8, vocab_size))
        ],
    }
    sampled_s = time.perf_counter() - started - start_s
    return {
        **{name: compare(folder, rows) for name, rows in found.items()},
        "start_s": round(start_s, 1),
        "sampled_s": round(sampled_s, 1),
        "versions": f"vllm {vllm.__version__}, torch {torch.__version__}",
    }


def run_apart(folder: str, name: str, way: str, seconds: float) -> dict[str, Any]:
    """Measure in another process, whose log is shown if it fails."""
    command = [sys.executable, __file__, "--measure", way, "--model", folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 1, "", f"not done within {seconds:g} s")
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    result = {"layout": name, "way": way, **(json.loads(line) if line else {"failed": done.stderr[-1500:]})}
    print(f"RESULT {json.dumps(result)}", flush=True)
    return result


def format_table(results: list[dict[str, Any]]) -> str:
    """Each case in a line of a Markdown table."""
    lines = ["| layout | graphs | batch: k3, largest | coming | alone | off by 20 % |", "|---|---|---|---|---|---|"]
    for result in results:
        if "failed" in result:
            lines.append(f"| {result['layout']} | {result['way']} | failed | | | |")
            continue
        ways = [result[name] for name in ("batch", "coming", "alone")]
        cells = [f"{each['k3']:.1e}, {each['largest']:.2g}" for each in ways]
        off = max(each["off_20pct"] for each in ways)
        lines.append(f"| {result['layout']} | {result['way']} | {' | '.join(cells)} | {100 * off:.1f} % |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--ways", default="vllm,full", help=f"'all', or of {', '.join(WAYS)}")
    parser.add_argument("--model", help="a folder, in place of the layouts")
    parser.add_argument("--jobs", type=int, default=8, help="processes at once")
    parser.add_argument("--seconds", type=float, default=240, help="for a case")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.model, args.measure)))
        return
    ways = list(WAYS) if args.ways == "all" else args.ways.split(",")
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(args.jobs) as pool:
        folders = {Path(args.model).name: args.model} if args.model else {}
        for layout in [] if args.model else args.layouts.split(","):
            folders[layout] = str(Path(root, layout.replace("/", "-")))
            save_model(layout, Path(folders[layout]))
        cases = [(folder, name, way, args.seconds) for way in ways for name, folder in folders.items()]
        results = list(pool.map(lambda case: run_apart(*case), cases))
    print(format_table(sorted(results, key=lambda each: list(folders).index(each["layout"]))))


if __name__ == "__main__":
    main()
