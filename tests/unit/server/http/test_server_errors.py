"""Errors of the store of sessions, as answers that say what an agent's SDK can do."""

import json

import pytest

from unbroken.errors import NotOwnerError, SessionEndedError, StoreError, UnknownSessionError
from unbroken.server.http.errors import error_response


@pytest.mark.parametrize(
    ("error", "status", "code", "text"),
    [
        (UnknownSessionError("s"), 404, "session_not_found", "there is no session 's'"),
        (SessionEndedError("s", "expired"), 409, "session_expired", "is expired"),
        (NotOwnerError("s"), 503, "session_elsewhere", "acquire it first"),
        (StoreError("the disk is full"), 503, "store_error", "sessions cannot be stored: the disk is full"),
    ],
)
def test_an_error_of_the_store_has_its_status_and_code(error, status, code, text):
    answer = error_response(error, path="/v1/chat/completions")
    body = json.loads(bytes(answer.body))["error"]
    assert (answer.status_code, body["code"]) == (status, code)
    assert text in body["message"]
    assert ("retry-after" in answer.headers) == (code == "session_elsewhere")
