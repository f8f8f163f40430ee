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


@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379"])
def test_ray_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    from unbroken.cluster import driver

    def fail(**options: object) -> None:
        raise Exception("The current node timed out during startup.\nTraceback ...")

    monkeypatch.setattr(driver.ray, "init", fail)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(InvalidInputError, match=r"--address .*Exception: The current node timed out") as caught:
        driver._connect(address, is_untrusted=False)
    assert "\n" not in str(caught.value)
