"""Parts of a run on several machines: options, what is refused, and the commands of a plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.clusters import RECIPE
from unbroken.cli import main
from unbroken.cluster.plan import ClusterOptions, Others, format_commands, make_plan
from unbroken.errors import InvalidInputError

POSTGRES = "postgresql://db/sessions"


def own(tmp_path: Path, *options: str) -> list[str]:
    return [f"--output={tmp_path / 'run'}", f"--model={tmp_path / 'model'}", *options]


def options(**values) -> ClusterOptions:
    return ClusterOptions(**{"trainers": "2x8", "engines": 12, "engine_tp": 2, **values})


def test_each_part_is_a_command_with_its_resources(tmp_path):
    plan = make_plan(
        RECIPE, options(samplers=16, gateways=1, gateway_store=POSTGRES), own(tmp_path, "--loop.num-steps=5")
    )
    assert [part.name for part in plan.parts] == [
        "trainers-0", "trainers-1", *(f"engine-{k}" for k in range(12)),
        *(f"sampler-{k}" for k in range(16)), "gateway-0",
    ]  # fmt: skip
    needs = [sum(part.resources.get(name, 0) for part in plan.parts) for name in ("CPU", "GPU")]
    assert needs == [16 + 12 + 16 + 1, 16 + 24]
    others = Others(gateway="http://g", trainers=("10.0.0.1", "10.0.0.2"), listen="0.0.0.0")
    words = {part.name: plan.make_words(part, others, host="10.0.0.1", port=8) for part in plan.parts}
    train = words["trainers-0"]
    assert train[0] == "train"
    assert {"--loop.num-steps=5", "--engine.kind=server", f"--engine.urls-file={tmp_path}/run/cluster/engines.txt"} < {
        *train
    }
    assert "--rollouts.listen=0.0.0.0:8500" in train
    serve = " ".join(words["engine-0"])
    assert f"serve {tmp_path}/model --host 10.0.0.1 --port 8" in serve
    assert f"--weights-dir {tmp_path}/run/weights --versions-from {tmp_path}/run/weights" in serve
    assert serve.endswith("--tensor-parallel-size 2")
    sampler = " ".join(words["sampler-9"])
    assert f"sampler --connect 10.0.0.2:8509 --key-file {tmp_path}/run/cluster/key" in sampler
    assert "--sessions.url=http://g" in sampler
    assert " ".join(words["gateway-0"]).endswith("--host 10.0.0.1 --port 8 --advertise http://10.0.0.1:8")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engines": 0}, "--engines must be >= 1, got 0"),
        ({"engine_tp": 0}, "--engine.tp must be >= 1, got 0"),
        ({"samplers": 3}, "--samplers must be at least the trainer processes of --trainers 2x8, 16, because"),
        ({"gateways": 2}, "--gateway.store must be a postgresql:// URL with --gateways 2"),
        ({"gateways": 2, "gateway_store": "runs/sessions"}, "--gateway.store must be a postgresql:// URL"),
        ({"gateway_store": POSTGRES}, "--gateway.store must be left out without --gateways"),
        ({"cpu": True}, "--engine.tp must be 1 with --cpu, got 2"),
        ({"env": ("A",)}, "--env must be NAME=VALUE, got 'A'"),
        ({"serve_options": "'"}, "--engine.options must be words of a shell"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(values, message):
    with pytest.raises(InvalidInputError, match=message):
        options(**values)


@pytest.mark.parametrize("text", ["2", "0x8", "2x0", "2x8x1", "x"])
def test_trainers_are_nodes_and_processes(text):
    with pytest.raises(InvalidInputError, match="--trainers must be NODESxPROCESSES, such as 2x8, got"):
        ClusterOptions(trainers=text)


@pytest.mark.parametrize(
    ("own_options", "message"),
    [
        (["--engine.kind=embedded"], "engine.kind must be left out for a cluster, .* got embedded"),
        (["--engine.kind=colocated"], "engine.kind must be left out for a cluster, .* got colocated"),
        (
            ["--engine.kind=server", "--engine.urls=http://a:1", "--engine.weights-dir=w"],
            "engine.urls must be left out for a cluster, which sets it",
        ),
    ],
)
def test_a_recipe_with_engines_of_its_own_is_refused(tmp_path, own_options, message):
    with pytest.raises(InvalidInputError, match=message):
        make_plan(RECIPE, options(), own(tmp_path, *own_options))


def test_a_recipe_without_a_model_needs_one_for_the_engines(tmp_path):
    recipe = Path(__file__).parents[3] / "recipes" / "lookup.py"
    with pytest.raises(InvalidInputError, match=r"--engine.model must be given: lookup.py has no model"):
        make_plan(recipe, options(), [f"--output={tmp_path}"])


def test_what_is_missing_in_a_cluster_is_named_with_its_option(tmp_path):
    plan = make_plan(RECIPE, options(), own(tmp_path))
    node = {"CPU": 100.0, "GPU": 8.0}
    assert plan.check_nodes([node] * 5) == ""
    assert plan.check_nodes([node, {"CPU": 100.0}]).startswith(
        "--trainers 2x8 needs 2 nodes with 8 GPUs each, and 1 of 2"
    )
    assert plan.check_nodes([node] * 4) == (
        "the parts need 40 GPUs (--trainers 16, --engine 24), and the cluster has 32: start more nodes, or give --cpu"
    )


def test_a_plan_deals_parts_out_to_hosts_and_prints_lines_of_a_shell(tmp_path):
    plan = make_plan(RECIPE, options(engines=3, gateways=1, gateway_store=POSTGRES), own(tmp_path))
    text = "\n".join(format_commands(plan, hosts=("a", "b", "c"), port=9000))
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert text.count("torch.distributed.run --nnodes 2 --nproc-per-node 8") == 2
    assert "--rdzv-endpoint a:8999" in text
    assert "printf '%s\\n' http://c:9000 http://c:9001 http://c:9002 >" in text
    assert 'CUDA_VISIBLE_DEVICES="2,3"' in text
    assert "--sessions.url=http://c:9003" in text
    with pytest.raises(InvalidInputError, match="--hosts must name at least 2 nodes"):
        list(format_commands(plan, hosts=("a",)))
    with pytest.raises(InvalidInputError, match="--hosts must be names of nodes that differ"):
        list(format_commands(plan, hosts=("a", "a")))
    with pytest.raises(InvalidInputError, match="--hosts must be names of nodes that differ"):
        list(format_commands(plan, hosts=("a", "b; touch x")))
    with pytest.raises(InvalidInputError, match="--port must be > 1 and leave 4 ports"):
        list(format_commands(plan, hosts=("a", "b"), port=65533))
    with pytest.raises(InvalidInputError, match=r"--sampler.port must be >= 1 and leave a port for each of 16"):
        options(sampler_port=65530)


def test_a_plan_of_relative_paths_names_no_folder_of_the_machine_that_printed_it(tmp_path, monkeypatch, capsys):
    """Another machine has other folders; `cluster run` itself needs absolute ones for Ray."""
    (tmp_path / "task" / "model").mkdir(parents=True)
    (tmp_path / "task" / "model" / "config.json").write_text("{}")
    (tmp_path / "task" / "rewards.py").write_text("def one(completions):\n    return [1.0] * len(completions)\n")
    (tmp_path / "task" / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "task" / "task.toml").write_text(
        'model = "model"\ndata.file = "prompts.jsonl"\noutput = "runs/a"\nloop.num_steps = 1\n'
        '[[rewards]]\nfunction = "rewards.py:one"\n'
    )
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "plan", "task/task.toml", "--engines=2", "--samplers=1"]) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path) not in printed
    assert " train task/task.toml " in printed
    assert "--engine.weights-dir=task/runs/a/weights" in printed
    plan = make_plan(Path("task/task.toml"), options(), []).resolve()
    assert (plan.recipe, plan.output) == (tmp_path / "task" / "task.toml", tmp_path / "task" / "runs" / "a")


def test_a_folder_with_any_name_is_one_word_of_a_plan(tmp_path):
    own_options = [f"--output={tmp_path / 'a b; touch c'}", f"--model={tmp_path / 'model'}"]
    plan = make_plan(RECIPE, options(engines=1), own_options)
    first = list(format_commands(plan, hosts=("a", "b", "c"), python=sys.executable))[2:4]
    subprocess.run(["bash", "-c", "\n".join(first)], check=True, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a b; touch c"]
    assert len((plan.folder / "key").read_text().strip()) == 48
    assert (plan.folder / "engines.txt").read_text() == "http://c:8300\n"


def test_the_command_prints_a_plan_without_ray(tmp_path, capsys):
    words = ["cluster", "plan", str(RECIPE), "--cpu", "--engines", "2", "--", *own(tmp_path)]
    assert main(words) == 0
    assert capsys.readouterr().out.count("unbroken serve") == 2
    script = f"import sys; from unbroken.cli import main; main({words!r}); sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_a_folder_without_a_cluster_has_no_status(tmp_path, capsys):
    assert main(["cluster", "status", str(tmp_path)]) == 1
    assert "OUTPUT must be the output folder of `unbroken cluster run`" in capsys.readouterr().err
