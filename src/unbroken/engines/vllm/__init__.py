"""vLLM as an engine, the only package that imports vllm: `AsyncLLM` in this process, ids in and ids out.

    engine = await VllmEngine.start(parse_engine_args(["--model", "Qwen/Qwen3-0.6B", "--tensor-parallel-size", "2"]))

From the outside in: `engine` checks requests and scores, and runs them through `requests` and `prompts`; `control`
acts on the whole engine (pause, sleep, update, close). `starting` reads vLLM's options, starts its processes and ends
them; `calls` waits for them, `failures` translates their errors, `conversion` parameters and outputs. `weights` brings
new weights to the workers, `sleeping` gives the GPU's memory back in between, `scoring` is a patch of vLLM's workers.
"""

from unbroken.engines.vllm.engine import VllmEngine
from unbroken.engines.vllm.starting import parse_engine_args

__all__ = ["VllmEngine", "parse_engine_args"]
