"""Installs each extra alone in a fresh virtual environment, and starts what it is for; in what the README installs, its
blocks are run.

    python tools/check_extras.py [EXTRA ...]     # default: every extra below; needs nothing but Python

An extra that lacks a requirement works on every developer's machine, where another extra has installed it. Left out are
`vllm`, which needs a GPU (`unbroken serve --engine vllm` there), and `dev`, which `make setup` installs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
LEFT_OUT = frozenset({"vllm", "dev"})

SAVE_TINY_MODEL = """
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE(vocab={text: k for k, text in enumerate(alphabet)}, merges=[]))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
tokenizer.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), head_dim=16, **sizes))
model.save_pretrained("tiny")
tokenizer.save_pretrained("tiny")
"""

SERVE = """
import json, signal, socket, subprocess, sys, time, urllib.request
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
server = subprocess.Popen([sys.executable, "-m", "unbroken", "serve", "--model", "tiny", "--port", str(port)])
body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
url = f"http://127.0.0.1:{port}/v1/chat/completions"
for _ in range(600):
    assert server.poll() is None, f"the server ended with status {server.returncode}"
    try:
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        break
    except OSError:
        time.sleep(0.2)
assert answer["usage"]["completion_tokens"] >= 1, answer
server.send_signal(signal.SIGTERM)
assert server.wait(60) == 0, server.returncode
"""

SAVE_TINY_TOKENIZER = (
    SAVE_TINY_MODEL.replace(", Qwen3Config, Qwen3ForCausalLM", "").partition("sizes =")[0]
    + """
tokenizer.save_pretrained("tiny")
"""
)

UPSTREAM = """
import sys, uvicorn
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.loader import load_tokenizer
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig
tokenizer = load_tokenizer("tiny")
engine = ScriptedEngine(lambda prompt_ids: tokenizer("hello<|im_end|>")["input_ids"], vocab_size=len(tokenizer))
app = create_app(engine, lambda options: None, TextCodec(tokenizer), ServerConfig(model_name="tiny"))
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""

GATEWAY = f"""
import importlib.util, json, pathlib, signal, socket, subprocess, sys, urllib.request
assert importlib.util.find_spec("torch") is None
def post(url, body, **headers):
    request = urllib.request.Request(url, json.dumps(body).encode(), {{"Content-Type": "application/json", **headers}})
    return json.load(urllib.request.urlopen(request, timeout=60))
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
upstream = subprocess.Popen([sys.executable, "-c", {UPSTREAM!r}, str(port)])
words = ["--upstream", f"http://127.0.0.1:{{port}}", "--tokenizer", "tiny", "--store", "sessions", "--port", "0"]
pathlib.Path("control.key").write_text("control")
words += ["--api-key-file", "control.key"]
gateway = subprocess.Popen([sys.executable, "-m", "unbroken", "gateway", *words], stdout=subprocess.PIPE, text=True)
line = gateway.stdout.readline()
url = line.split(" at ")[1].split()[0]
created = post(f"{{url}}/v1/sessions", {{}}, Authorization="Bearer control")
body = {{"model": "gpt-5", "messages": [{{"role": "user", "content": "hi"}}]}}
key = "Bearer " + created["api_key"]
answer = post(created["openai_base_url"] + "/chat/completions", body, Authorization=key)
assert answer["choices"][0]["message"]["content"] == "hello", answer
gateway.send_signal(signal.SIGTERM)
assert gateway.wait(60) == 0, gateway.returncode
upstream.kill()
"""

CLIENT = """
import asyncio
from unbroken import AsyncClient, Client, HttpEngine
async def main():
    async with AsyncClient("http://127.0.0.1:9") as client:
        assert not await client.health()
asyncio.run(main())
"""

LORA = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from unbroken.training.model.adapters import check_adapters, merge_parameters
model = AutoModelForCausalLM.from_pretrained("tiny")
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
check_adapters(model)
assert dict(merge_parameters(model, gather=lambda parameter: parameter.detach()))
"""

VISION = """
from PIL import Image
from unbroken.images.decoder import decode_image, encode_picture
assert decode_image(encode_picture(Image.new("RGB", (3, 2), "red"))).getpixel((0, 0)) == (255, 0, 0)
"""

POSTGRES = """
from unbroken.errors import StoreError
from unbroken.ledger.store import open_store
try:
    open_store("postgresql://127.0.0.1:9/x")
except StoreError as error:
    assert "refused" in str(error), error
"""

SHORT_RUN = (
    "--warm-up.max-drill-steps=1 --warm-up.num-demo-steps=1 --loop.num-steps=1 --rollouts.problems-per-step=1 "
    "--rollouts.group-size=2 --evaluation.num-problems=2"
)

GYM = """
import asyncio
from unbroken.integrations.gym import GymEnv
start = asyncio.run(GymEnv("FrozenLake-v1", options={"render_mode": "ansi"}).start())
assert "[S]FFF" in start.messages[0]["content"], start
"""

REASONING_GYM = """
import asyncio
from unbroken.integrations.reasoning_gym import ReasoningGymEnv
start = asyncio.run(ReasoningGymEnv("leg_counting").start())
assert "legs" in start.messages[0]["content"], start
"""

MCP = """
import asyncio, sys
from unbroken.integrations.mcp import McpServer, McpSession
program = (
    "from mcp.server.mcpserver import MCPServer; server = MCPServer('x'); "
    "server.tool(name='add')(lambda a, b: int(a) + int(b)); server.run('stdio')"
)
async def main():
    async with McpSession(McpServer(command=(sys.executable, "-c", program))) as session:
        return await session.tools[0].call({"a": 17, "b": 6})
outcome = asyncio.run(main())
assert outcome.content == "23", outcome
"""

OPENENV = """
import asyncio, json
from websockets.asyncio.server import serve
from unbroken.integrations.openenv import OpenEnv
async def answer(socket):
    await socket.recv()
    await socket.send(json.dumps({"type": "observation", "data": {"observation": {"prompt": "Hello."}, "done": False}}))
async def main():
    async with serve(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        env = OpenEnv(f"http://127.0.0.1:{port}", action="message", observation="prompt")
        start = await env.start()
        await env.close()
        return start.messages[0]["content"]
assert asyncio.run(main()) == "Hello."
"""

NEMO_GYM = """
import asyncio, http.server, json, threading
from pathlib import Path
from unbroken.integrations.nemo_gym import NeMoGymEnv
class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = json.dumps({"reward": 0.5}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
async def main():
    env = NeMoGymEnv(f"http://127.0.0.1:{server.server_port}", Path("examples.jsonl"))
    start = await env.start()
    reward = await env.reward([*start.messages, {"role": "assistant", "content": "Hello."}])
    await env.close()
    return reward
Path("examples.jsonl").write_text('{"responses_create_params": {"input": "Hello?"}}')
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
assert asyncio.run(main()) == 0.5
"""

README = "train,serve,client"
"""What `make demo` and the README install: tests/e2e/test_documentation.py compares both."""
README_TESTS = (
    f"-q -k readme --noconftest -c {os.devnull} --rootdir {REPOSITORY} --import-mode=importlib -p no:cacheprovider "
    f"{REPOSITORY / 'tests' / 'e2e' / 'test_documentation.py'}"
)

RAY = """
import ray
from unbroken.cluster import driver
ray.init(address="local", include_dashboard=False, log_to_driver=False)
assert len(ray.nodes()) == 1
ray.shutdown()
"""

CHECKS: dict[str, tuple[list[str], ...]] = {
    "train": (["-m", "unbroken", "train", str(REPOSITORY / "recipes" / "lookup.py"), *SHORT_RUN.split()],),
    "serve": (["-c", SAVE_TINY_MODEL], ["-c", SERVE]),
    "gateway": (["-c", SAVE_TINY_TOKENIZER], ["-c", GATEWAY]),
    "client": (["-c", CLIENT],),
    "lora": (["-c", SAVE_TINY_MODEL], ["-c", LORA]),
    "torchao": (
        [
            "-m",
            "unbroken",
            "train",
            str(REPOSITORY / "recipes" / "lookup.py"),
            *SHORT_RUN.split(),
            "--trainer.optimizer.name=adamw_8bit",
        ],
    ),
    "vision": (["-c", VISION],),
    "trackers": (
        ["-c", SAVE_TINY_MODEL],
        [
            str(REPOSITORY / "tools" / "check_trackers.py"),
            str(REPOSITORY / "recipes" / "sums" / "recipe.toml"),
            "--model=tiny",
            "--rollouts.problems-per-step=2",
            "--rollouts.group-size=2",
            "--evaluation.num-problems=2",
        ],
    ),
    "postgres": (["-c", POSTGRES],),
    "ray": (["-c", RAY],),
    "gym": (["-c", GYM],),
    "reasoning-gym": (["-c", REASONING_GYM],),
    "mcp": (["-c", MCP],),
    "openenv": (["-c", OPENENV],),
    "nemo-gym": (["-c", NEMO_GYM],),
    "tinker": (["-c", "import unbroken.tinker.server"],),
    "completion": (["-m", "unbroken", "--install-completion", "bash"],),
    "docs": (
        ["-m", "mkdocs", "build", "--strict", "--config-file", str(REPOSITORY / "mkdocs.yml"), "--site-dir", "site"],
    ),
    "trl": (["-c", "import trl; from unbroken.integrations.trl import rollout_func"],),
    README: (["-m", "pip", "install", "--quiet", "pytest>=9.2"], ["-m", "pytest", *README_TESTS.split()]),
    "": (["-m", "unbroken", "--version"], ["-c", "import unbroken; unbroken.TemplateRenderer, unbroken.run_rollout"]),
}
"""Arguments of Python for each extra; the empty one is the package without extras."""


def main() -> int:
    """Check the extras and return the exit status."""
    parser = argparse.ArgumentParser(description="Install each extra alone and start what it is for.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of {sorted(filter(None, CHECKS))}; default: all")
    wanted = parser.parse_args().extras or list(CHECKS)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    if unknown := {*project["optional-dependencies"]} - LEFT_OUT ^ {*CHECKS} - {"", README}:
        print(f"extras of pyproject.toml and of CHECKS differ: {sorted(unknown)}", file=sys.stderr)
        return 1
    failed = []
    with tempfile.TemporaryDirectory(prefix="extras-") as folder:
        wheel = build_wheel(Path(folder))
        for extra in wanted:
            start = time.perf_counter()
            is_good = check_extra(extra, wheel, Path(folder) / (extra or "base"))
            print(
                f"{extra or '(none)':>10} {'ok' if is_good else 'FAILED'} {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            failed += [] if is_good else [extra]
    return 1 if failed else 0


def build_wheel(folder: Path) -> Path:
    """Build the checkout's wheel, so that nothing is imported from the checkout."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY)]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("unbroken-*.whl")
    return wheel


def check_extra(extra: str, wheel: Path, folder: Path) -> bool:
    """Install one extra and run its checks in an empty folder; prints the output of what fails."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = str(folder / "venv" / "bin" / "python")
    requirement = f"{wheel}[{extra}]" if extra else str(wheel)
    install = ["-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", requirement]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {
        "HOME": str(folder)
    }
    for arguments in (install, *CHECKS[extra]):
        done = subprocess.run(
            [python, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
        )
        if done.returncode:
            print(f"--- {extra}: python {' '.join(arguments)[:200]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
