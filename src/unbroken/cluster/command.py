"""The command `unbroken cluster`: `run`, `status` and `plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unbroken.cluster.plan import ClusterOptions, Plan, format_commands, make_plan
from unbroken.cluster.registry import FOLDER, STATE
from unbroken.errors import InvalidInputError, missing_extra
from unbroken.server.config import is_loopback
from unbroken.server.options import OptionGroup
from unbroken.untrusted import MAX_FACTS_BYTES, read_end, read_json, read_json_file

_STALE_S = 15.0
_MAX_LINE_BYTES = 1 << 20
_NUMBERS = {
    "trained_version": "train/policy_version",
    "seconds_of_a_step": "seconds/step",
    "sampled_ids_per_second": "tokens_per_s/generation",
    "trained_ids_per_second": "tokens_per_s/training",
    "reward": "reward/mean",
}
"""Metrics of the last step, in a status."""


def add_cluster_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    cluster = commands.add_parser(
        "cluster",
        help="a run on several machines: trainers, engines, samplers and gateways, placed and watched by Ray",
        description="A run on several machines (docs/cluster.md).",
        allow_abbrev=False,
    )
    kinds = cluster.add_subparsers(required=True, metavar="{run,status,plan}")
    run = kinds.add_parser("run", help="run a recipe on a Ray cluster", allow_abbrev=False)
    _add_parts(run)
    run.add_argument(
        "--address", metavar="HOST:PORT", help="of the Ray cluster (default: the one that runs here); local starts one"
    )
    run.add_argument(
        "--wait-s", type=float, default=60.0, metavar="SECONDS", help="how long to wait for nodes (default: 60)"
    )
    run.add_argument("--no-ray-token", action="store_true", help="accept a Ray cluster without a token")
    run.set_defaults(run=_run, advice="; the same command continues from the last checkpoint, if there is one")
    status = kinds.add_parser("status", help="who lives, versions, restarts with their reasons", allow_abbrev=False)
    status.add_argument("output", type=Path, metavar="OUTPUT", help="output folder of the run")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(run=_print_status)
    plan = kinds.add_parser(
        "plan", help="print the commands of each node, for Slurm or by hand; no Ray", allow_abbrev=False
    )
    _add_parts(plan)
    plan.add_argument("--hosts", default="", metavar="HOST,...", help="names of the nodes; trainers have the first")
    plan.add_argument(
        "--port", type=int, default=8300, metavar="PORT", help="the first port of servers (default: 8300)"
    )
    plan.set_defaults(run=_print_plan)


def _add_parts(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"unbroken {parser.prog.partition(' ')[2]} RECIPE [OPTION ...] [-- --FIELD VALUE ...]"
    parser.epilog = "What follows -- are the recipe's own options, as those of `unbroken train RECIPE`."
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a Python or TOML file")
    parts = OptionGroup(parser, "parts", ClusterOptions)
    parts.add("trainers", metavar="NODESxPROCESSES")
    for name in ("engines", "samplers", "gateways", "cpus"):
        parts.add(name, type=int, metavar="NUMBER")
    parts.add("cpu", action="store_true")
    parts.add("env", action="append", default=[], metavar="NAME=VALUE")
    parts.add("engine_model", option="--engine.model", dest="engine_model", metavar="MODEL")
    parts.add("engine_tp", option="--engine.tp", dest="engine_tp", type=int, metavar="GPUS")
    parts.add("serve_options", option="--engine.options", dest="serve_options", metavar="TEXT")
    parts.add("sampler_port", option="--sampler.port", dest="sampler_port", type=int, metavar="PORT")
    parts.add("gateway_store", option="--gateway.store", dest="gateway_store", metavar="URL")


def _make_plan(arguments: argparse.Namespace) -> Plan:
    values = {each.name: getattr(arguments, each.name) for each in dataclasses.fields(ClusterOptions)}
    options = ClusterOptions(**values | {"env": tuple(values["env"])})
    try:
        return make_plan(arguments.recipe, options, arguments.recipe_options)
    except ModuleNotFoundError as error:  # of the user's own modules it is another error
        raise missing_extra(error, "a recipe needs the train extra", "train") from error


def _run(arguments: argparse.Namespace) -> int:
    from unbroken.runs.command import check_wait

    plan = _make_plan(arguments).resolve()
    check_wait(arguments.wait_s)
    if arguments.address == "local" or is_loopback((arguments.address or "").rpartition(":")[0]):
        # Read when Ray is imported: otherwise it takes another address of this machine, and listens on all.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        from unbroken.cluster.driver import run_on_cluster
    except ModuleNotFoundError as error:
        raise missing_extra(error, "unbroken cluster run needs Ray", "ray") from error
    run_on_cluster(plan, address=arguments.address, wait_s=arguments.wait_s, is_untrusted=arguments.no_ray_token)
    return 0


def _print_plan(arguments: argparse.Namespace) -> int:
    plan = _make_plan(arguments)
    hosts = tuple(filter(None, arguments.hosts.split(",")))
    print("\n".join(format_commands(plan, hosts=hosts, port=arguments.port)))
    return 0


def _print_status(arguments: argparse.Namespace) -> int:
    print(describe_status(arguments.output, as_json=arguments.json))
    return 0


def describe_status(output: Path, *, as_json: bool = False) -> str:
    """How a cluster is, and how fast its run, in lines; raises `InvalidInputError` without one in the folder."""
    status = _read_status(output)
    if as_json:
        return json.dumps(status)
    try:
        return "\n".join(_format_status(status))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInputError(
            f"{FOLDER}/{STATE} of OUTPUT must be as `unbroken cluster run` writes it: {type(error).__name__}: {error}"
        ) from None


def _read_status(output: Path) -> dict[str, Any]:
    try:
        status: dict[str, Any] = dict(read_json_file(output / FOLDER / STATE, max_bytes=MAX_FACTS_BYTES))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInputError(
            f"OUTPUT must be the output folder of `unbroken cluster run`, got {output}: {error}"
        ) from None
    metrics = output / "metrics" / "metrics.jsonl"
    last: Any = {}
    with suppress(OSError, ValueError, TypeError, IndexError):  # no step yet, or its line is not whole
        last = dict(read_json(read_end(metrics, max_bytes=_MAX_LINE_BYTES).splitlines()[-1], max_bytes=_MAX_LINE_BYTES))
    return status | {"step": last.get("step"), **{name: last.get(key) for name, key in _NUMBERS.items()}}


def _format_status(status: Mapping[str, Any]) -> Iterator[str]:
    age_s = time.time() - status["time_s"]
    if age_s > _STALE_S:
        yield f"as of {age_s:.0f} s ago: the run has ended, or its registry is not there"
    numbers = [f"{name.replace('_', ' ')} {status[name]:.4g}" for name in _NUMBERS if status[name] is not None]
    yield f"step {status['step']}, {', '.join(numbers)}" if numbers else "no step has been trained"
    versions = ", ".join(f"{version} on {number}" for version, number in status["versions"].items())
    yield f"versions at engines: {versions or 'none'}; nodes: {', '.join(n['name'] for n in status['nodes']) or 'none'}"
    gang = status["gang"]
    yield f"the gang of trainers started again {gang['restarts']} times{_because(gang)}"
    yield from map(_format_part, status["parts"])


def _format_part(part: Mapping[str, Any]) -> str:
    version = "" if part["version"] is None else f" version {part['version']}"
    restarts = f"; {part['restarts']} restarts{_because(part)}" if part["restarts"] else ""
    where = f" on {part['node']}" if part["node"] else ""
    url = f" at {part['url']}" if part["url"] else ""
    return f"{part['name']:<12} {part['state']}{where}{url}{version}{restarts}"


def _because(facts: Mapping[str, Any]) -> str:
    return f", the last because: {facts['reason']}" if facts["reason"] else ""
