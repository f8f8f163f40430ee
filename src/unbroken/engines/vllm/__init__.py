"""vLLM as an engine, the only package that imports vllm: `AsyncLLM` in this process, ids in and ids out.

    engine = await VllmEngine.start(parse_engine_args(["--model", "Qwen/Qwen3-0.6B", "--tensor-parallel-size", "2"]))

From the outside in: `engine` checks requests and scores, and runs them through `requests` and `prompts`; `control`
acts on the whole engine (pause, sleep, update, close). `startup` reads vLLM's options, starts its processes and ends
them, and `causes` says why one did not start; `calls` waits for them and translates their errors, `conversion`
parameters and outputs. `delivery` brings new weights to the workers, `patches` has patches of vLLM's workers.
`numerics` has what makes vLLM and a trainer compute the same bits.

Importing the package does not import vLLM; its two names do, at their first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unbroken.engines.vllm.engine import VllmEngine
    from unbroken.engines.vllm.startup import parse_engine_args
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from unbroken.engines.vllm import engine, startup

        return {"VllmEngine": engine.VllmEngine, "parse_engine_args": startup.parse_engine_args}[name]


__all__ = ["VllmEngine", "parse_engine_args"]
