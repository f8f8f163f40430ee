"""The command line of `unbroken serve`."""

import argparse
import dataclasses
import re

import pytest

from support.servers import server_tokenizer
from support.templates import QWEN
from support.tokenizers import make_tokenizer
from unbroken.cli import main
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError
from unbroken.images.decoder import ImageLimits
from unbroken.server.config import ServerLimits
from unbroken.server.options import ServeOptions, add_arguments, name_model, read_options
from unbroken.server.process import make_renderer_factory, run_server


def parse(*words: str) -> ServeOptions:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    arguments, others = parser.parse_known_args(["--model", "tiny", *words])
    return read_options(arguments, others)


def make_renderer(options: ServeOptions, **template_kwargs):
    return make_renderer_factory(options, options.tokenizer or options.model, None, ImageLimits())(template_kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    server_tokenizer().save_pretrained(path)
    return str(path)


def test_help_explains_every_option_and_every_limit(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    text = capsys.readouterr().out
    options = [line for line in text.splitlines() if line.startswith("  --")]
    helps = [block.split("\n", 1) for block in text.split("\n  --")[1:]]
    assert len(options) == len(helps)
    assert all(len(help_text.split()) >= 4 for _, help_text in helps)
    for limit in dataclasses.fields(ServerLimits):
        assert f"--{limit.name.replace('_', '-')} NUMBER" in text
        assert f"Default: {limit.default}." in text


def test_every_limit_has_an_option():
    options = parse("--max-n", "7", "--request-timeout-s", "1.5", "--retry-after-s", "3")
    assert options.config.limits == ServerLimits(max_n=7, request_timeout_s=1.5, retry_after_s=3)


def test_a_limit_out_of_range_is_named_by_its_option():
    with pytest.raises(InvalidInputError, match="--max-n must be > 0, got 0"):
        parse("--max-n", "0")


def test_unknown_options_go_to_the_engine():
    assert parse("--tensor-parallel-size", "2").engine_options == ("--tensor-parallel-size", "2")


def test_completions_are_read_by_the_parser_that_is_named(folder):
    options = parse("--tokenizer", folder)
    assert make_renderer(options).parser_name == "hermes"
    assert make_renderer(dataclasses.replace(options, parser="llama3")).parser_name == "llama3"


async def test_what_the_template_is_warned_of_is_logged_once_at_the_start(tmp_path, caplog):
    make_tokenizer(QWEN.replace("tool_call>", "do>")).save_pretrained(tmp_path)
    renderers = []

    async def start_engine(codec, processor, limits):
        return ScriptedEngine([], vocab_size=8)

    def make_app(engine, make, codec, config, **images):
        renderers.extend([make({}), make({}), make({"enable_thinking": False})])
        raise InvalidInputError("enough")

    async def check(engine, renderer):
        renderers.append(renderer)
        return "checked"

    names = {"model": str(tmp_path), "tokenizer": str(tmp_path)}
    with pytest.raises(InvalidInputError, match="enough"):
        await run_server(parse(), **names, start_engine=start_engine, make_app=make_app, check=check)
    checked, first, second, other = renderers
    assert checked is first is second
    assert other is not first
    assert caplog.messages == [first.unread_calls, other.unread_calls]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--parser", "none such"), "--parser must be one of .*'none such'"),
        (("--history", "none such"), "--history must be one of .*'none such'"),
    ],
)
def test_a_wrong_name_is_an_error_that_names_the_option_before_the_engine_starts(words, expected, folder, capsys):
    assert main(["serve", "--model", folder, "--engine", "transformers", *words]) == 1
    error = capsys.readouterr().err

    assert re.search(expected, error), error


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["serve", "tiny", "--port", "0"], ["serve", "--model", "tiny", "--port", "0"]),
        (["serve", "--model", "tiny", "--max-model-len", "64"], ["serve", "--model", "tiny", "--max-model-len", "64"]),
        (["serve", "tiny", "--model=other"], ["serve", "tiny", "--model=other"]),
        (["serve"], ["serve"]),
    ],
)
def test_the_first_word_may_be_the_model_and_values_of_engine_options_are_not(given, read):
    assert name_model(given) == read
