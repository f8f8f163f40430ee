"""The demo's warm model: a copy of the one in the package, or one that is warmed up here.

The package has what `WarmUpConfig()` and seed 0 make (`words/`), bit for bit where it was made: the warm-up takes 100
CPU seconds, and minutes beside other programs. Torch is imported only to make another one.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path

from unbroken.demo.config import WarmUpConfig
from unbroken.weights.folders import atomic_folder

_NUM_HEADS = 4


def write_warm_model(folder: Path, config: WarmUpConfig, *, seed: int, num_heads: int = _NUM_HEADS) -> None:
    """Write the tiny model, warmed up, with its tokenizer into `folder`."""
    if (config, seed, num_heads) == (WarmUpConfig(), 0, _NUM_HEADS):
        with atomic_folder(folder) as part:
            _copy(part)
        return
    from unbroken.demo.model import build_model, build_tokenizer, warm_up

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed, num_heads=num_heads)
    warm_up(model, tokenizer, config, seed=seed, on_stage=partial(print, "warm-up:"))
    with atomic_folder(folder) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)


def _copy(folder: Path) -> None:
    """Copy the package's model; its chat template is the demo's."""
    demo = files("unbroken.demo")
    for each in demo.joinpath("words").iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    (folder / "chat_template.jinja").write_bytes(demo.joinpath("chat.jinja").read_bytes())
