"""I9 with vLLM: planted faults are found, by the check of a run and by `unbroken serve --check`; right weights pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.planted_faults import FAULTS, make_check, make_model, save_model
from support.served import served
from support.vllm_session import SMALL_VLLM
from unbroken.cli import main
from unbroken.errors import PolicyMismatchError
from unbroken.runs.policy_check import DENSE
from unbroken.weights.sources import TensorSource

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("fault", FAULTS)
async def test_i9_a_planted_fault_in_vllm_is_found(fault, tmp_path: Path):
    from support.vllm_engines import start_engine

    save_model(tmp_path / "model", FAULTS[fault]())
    engine = await start_engine(tmp_path / "model")
    try:
        with pytest.raises(PolicyMismatchError, match=r"two policies \(I9\): k3 is .* vllm"):
            await make_check(engine, make_model(), max_k3=DENSE).run()
    finally:
        await engine.close()


async def test_i9_vllm_passes_with_its_own_weights_and_fails_after_an_update_that_did_not_arrive(tmp_path: Path):
    from support.vllm_engines import start_engine

    save_model(tmp_path / "model", make_model())
    engine = await start_engine(tmp_path / "model")
    try:
        assert "one policy" in await make_check(engine, make_model(), max_k3=DENSE).run()
        await engine.update_weights(TensorSource(make_model().named_parameters()), policy_version=1)
        with pytest.raises(PolicyMismatchError, match="by policy version 1"):
            await make_check(engine, make_model(seed=1), max_k3=DENSE, version=1).run()
    finally:
        await engine.close()


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    """The words of `unbroken train` on a task whose model is `make_model()`."""
    save_model(tmp_path / "right", make_model())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n' * 4)
    (tmp_path / "rewards.py").write_text("def short(completions):\n    return [float(len(c)) for c in completions]\n")
    (tmp_path / "task.toml").write_text(
        'data.file = "prompts.jsonl"\nloop.num_steps = 2\nrollouts.sampling.max_tokens = 8\n'
        'rollouts.problems_per_step = 2\nrollouts.group_size = 2\n[[rewards]]\nfunction = "rewards.py:short"\n'
    )
    own = ["--model", str(tmp_path / "right"), "--output", str(tmp_path / "run")]
    return ["train", str(tmp_path / "task.toml"), *own]


@pytest.mark.parametrize("fault", FAULTS)
def test_i9_a_run_with_a_server_of_other_weights_ends_before_its_first_step(fault, task, tmp_path: Path, capsys):
    save_model(tmp_path / "wrong", FAULTS[fault]())
    with served(tmp_path / "wrong", "--weights-dir", str(tmp_path / "weights"), engine="transformers") as server:
        options = ["--engine.kind", "server", "--engine.urls", server.url]
        assert main([*task, *options, "--engine.weights-dir", str(tmp_path / "weights")]) == 1
    printed = capsys.readouterr()
    assert "unbroken: engine: sampler and trainer have two policies (I9): k3 is" in printed.err
    assert "Nothing was trained" in printed.err
    assert "step 0" not in printed.out


def test_a_run_with_the_right_server_says_what_was_compared(task, tmp_path: Path, capsys):
    options = ["--weights-dir", str(tmp_path / "weights")]
    with served(tmp_path / "right", *options, "--check", engine="transformers") as server:
        words = ["--engine.kind", "server", "--engine.urls", server.url]
        assert main([*task, *words, "--engine.weights-dir", str(tmp_path / "weights")]) == 0
    printed = capsys.readouterr().out
    assert "engine: one policy with the trainer, k3 " in printed
    assert "step 1 (2 of 2)" in printed


def test_i9_a_server_that_is_checked_is_not_started_with_another_policy(tmp_path: Path, capsys):
    """vLLM's own option gives the engine another rotary base than the folder's, which transformers reads."""
    save_model(tmp_path / "model", make_model())
    wrong = '{"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}'
    words = ["serve", str(tmp_path / "model"), "--engine", "vllm", "--port", "0", *SMALL_VLLM]
    assert main([*words, "--max-model-len", "512", "--hf-overrides", wrong, "--check"]) == 1
    assert "two policies (I9)" in capsys.readouterr().err
