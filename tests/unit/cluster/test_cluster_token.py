"""Ray's token is the right to run code as its owner: nobody else may read it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from unbroken.errors import InvalidInputError

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (make e2e)")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_token_that_others_may_read_is_refused_unless_another_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    from unbroken.cluster.driver import check_token_file

    monkeypatch.setenv("HOME", str(tmp_path))
    check_token_file({})
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("0" * 64)
    file.chmod(mode)
    with pytest.raises(InvalidInputError, match=rf"auth_token must be readable by its owner alone.*got mode {mode:o}"):
        check_token_file({})
    check_token_file({"RAY_AUTH_TOKEN_PATH": "/run/secrets/token"})
    file.chmod(0o600)
    check_token_file({})
