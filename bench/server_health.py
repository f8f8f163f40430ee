"""Time /health during a batch of 64 prompts x n=4: `unbroken serve` on vLLM, with a tiny model.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/server_health.py

Target: the 99th percentile under 100 ms. One probe every 10 ms until the batch is answered.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from server import NAME, Load, free_port, make_load, run_server, save_model
from unbroken.client import AsyncClient


async def probe(url: str, load: Load) -> list[float]:
    """Measure the seconds of each probe during one batch."""
    times: list[float] = []
    async with AsyncClient(url) as client, httpx.AsyncClient(base_url=url, timeout=60) as http:
        batch = asyncio.create_task(load.ours_batch(client))
        while not batch.done():
            start = time.perf_counter()
            (await http.get("/health")).raise_for_status()
            times.append(time.perf_counter() - start)
            await asyncio.sleep(0.01)
        await batch
    return times


def main() -> None:
    """Print the percentiles of three batches."""
    load = make_load(64, 4, 256)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), "tiny", "float32")
        command = [
            sys.executable, "-m", "unbroken", "serve", "--model", folder, "--served-model-name", NAME, "--engine",
            "vllm", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager",
        ]  # fmt: skip
        with run_server(command, url):
            for number in range(3):
                times = asyncio.run(probe(url, load))
                p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
                print(
                    f"batch {number}: {len(times)} probes, median {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, "
                    f"longest {max(times) * 1e3:.1f} ms"
                )


if __name__ == "__main__":
    main()
