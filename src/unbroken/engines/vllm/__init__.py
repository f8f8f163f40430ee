"""vLLM as an engine, the only package that imports vllm: `AsyncLLM` in this process, ids in and ids out.

    engine = await VllmEngine.start(parse_engine_args(["--model", "Qwen/Qwen3-0.6B", "--tensor-parallel-size", "2"]))

From the outside in: `engine` checks requests and scores, and runs them through `requests` and `prompts`; `starting`
reads vLLM's own options, starts its processes and ends them; `conversion` goes from our parameters to vLLM's and from
its outputs to ours, `failures` from its errors to ours. `control` is what is done to the whole engine (pause, sleep,
update), `state`
what it is doing, `calls` how vLLM is asked. New weights come in by `weights`; `sleeping` gives the GPU's memory back in
between. `scoring` is a patch of vLLM inside the workers.
"""

from unbroken.engines.vllm.engine import VllmEngine
from unbroken.engines.vllm.starting import parse_engine_args

__all__ = ["VllmEngine", "parse_engine_args"]
