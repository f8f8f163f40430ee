"""Requests made from our own OpenAPI description, right ones and wrong ones: no 5xx, no hang."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from support.effort import num_cases
from support.servers import MODEL, make_app, scripted_engine
from unbroken.server.config import ServerLimits

USER = {"role": "user", "content": "hi"}
RANGES = {"n": 4, "max_tokens": 50, "temperature": 2, "top_p": 1, "min_p": 1, "repetition_penalty": 2, "best_of": 1}
LONGEST_S = 60.0
NUM_EXAMPLES = num_cases(10)


@pytest.fixture(scope="module")
def no_proxies() -> Iterator[None]:
    """For each request, the library `requests` reads all environment variables twice in search of a proxy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "testserver")
        yield


@pytest.fixture(scope="module")
def schema(no_proxies: None) -> schemathesis.BaseSchema:
    engine = scripted_engine("<think>\nhm\n</think>\n\nhello<|im_end|>", context_length=512)
    app = make_app(engine, limits=ServerLimits(max_n=4, request_timeout_s=LONGEST_S), hosts=("testserver",))
    generation = GenerationConfig(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    config = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=generation)))
    return schemathesis.openapi.from_asgi("/openapi.json", app, config=config)


@pytest.fixture
def old_node_id(request: pytest.FixtureRequest) -> None:
    """Schemathesis 4.32 reads and changes the private id that nodes of pytest had before 9.2."""
    request.node._nodeid = request.node.nodeid


# An engine that is paused or sleeps would answer nothing more, and one that meets a trainer waits a minute for it.
described = schemathesis.pytest.from_fixture("schema").exclude(
    path=["/pause", "/sleep", "/init_weight_transfer_engine"]
)
"""Requests are made when the test runs, not in each process that collects it; each route is a subtest."""


@pytest.mark.e2e  # half a minute, nearly all in schemathesis
@pytest.mark.usefixtures("old_node_id")
@described.parametrize()
@settings(max_examples=NUM_EXAMPLES, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_what_the_description_allows_or_forbids_is_answered(case: schemathesis.Case) -> None:
    check_answered(case)
    if isinstance(case.body, dict):
        case.body = tamed(case.body)
        check_answered(case)


def check_answered(case: schemathesis.Case) -> None:
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


def tamed(value: Any, key: str = "") -> Any:
    """A body like the given one that gets further: whole numbers and ids in range, messages with roles, our model."""
    if isinstance(value, dict):
        named = {name: tamed(item, name) for name, item in value.items()}
        return {**named, **({"model": MODEL} if "model" in value else {})}
    if key == "messages" and isinstance(value, list):
        return [USER if isinstance(one, dict) else tamed(one, key) for one in value] or [USER]
    if isinstance(value, list):
        return [tamed(item, key) for item in value] or [1]
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) % RANGES.get(key, 100) + 1
    return value


def test_every_route_has_a_summary_and_tells_its_answers(schema: schemathesis.BaseSchema) -> None:
    for operations in schema.raw_schema["paths"].values():
        for operation in operations.values():
            assert operation["summary"]
            assert operation["description"]
            assert {"200", "400", "401", "429", "503"} <= set(operation["responses"])
            assert "422" not in operation["responses"]
