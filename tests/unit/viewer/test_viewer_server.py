"""The pages on this machine, and as a folder: who gets them, and that text of rollouts stays text."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator

import pytest

from support.recorded import HOSTILE, make_trajectory, write_run, write_step
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.viewer.assets import ASSETS, read_asset
from unbroken.viewer.resources import Resources, open_runs
from unbroken.viewer.server import ViewerServer, export_page
from unbroken.viewer.sources.runs import RunReader


@pytest.fixture
def server(tmp_path) -> Iterator[ViewerServer]:
    with ViewerServer(open_runs([write_run(tmp_path)])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: ViewerServer, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers=names)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, response.headers, data


def test_a_page_its_files_and_its_objects_are_served(server):
    base = f"/{server.secret}/"
    status, headers, page = get(server, base)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "script-src 'self';" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert (headers["Referrer-Policy"], headers["X-Content-Type-Options"]) == ("no-referrer", "nosniff")
    for name in re.findall(rb'(?:src|href)="([\w.]+)"', page):
        assert get(server, base + name.decode())[0] == 200
    assert json.loads(get(server, f"{base}api/index")[2])["runs"][0]["state"] == "ended"
    rollout = json.loads(get(server, f"{base}api/run/0/step/1/rollout/2")[2])
    assert rollout["record"]["error"] == HOSTILE.replace("\ud800", "?")
    assert get(server, f"{base}api/run/0/step/7")[0] == 404
    assert get(server, f"{base}../../etc/passwd")[0] == 404


def test_a_request_without_the_secret_gets_nothing(server):
    for path in ("/", "/api/index", f"/{server.secret[:-1]}/api/index", f"/{server.secret}", "//", "/%C3%BC/"):
        status, _, data = get(server, path)
        assert status == 403, path
        assert b"secret" in data


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "localhost:1"])
def test_another_host_is_refused(server, host):
    assert get(server, f"/{server.secret}/api/index", Host=host)[0] == 403


def test_pages_of_other_origins_read_nothing_but_can_link_here(server):
    path = f"/{server.secret}/api/index"
    assert get(server, path, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert get(server, path, Sec_Fetch_Site="same-site")[0] == 403
    assert get(server, path, Sec_Fetch_Site="same-origin")[0] == 200
    assert get(server, f"/{server.secret}/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    assert get(server, f"/{server.secret}/", Host=f"localhost:{server.server_port}")[0] == 200


NOTE_PATH = "api/run/0/step/1/rollout/1/note"
NOTE = json.dumps(
    {"labels": ["odd"], "text": HOSTILE.replace("\ud800", "?"), "sha256": "0" * 64, "shown_time_s": None}
).encode()


def make_note(server: ViewerServer, text: str = HOSTILE.replace("\ud800", "?"), *labels: str) -> bytes:
    """What the page sends of the rollout of NOTE_PATH as it is now."""
    shown = json.loads(get(server, f"/{server.secret}/{NOTE_PATH.removesuffix('/note')}")[2])
    sent = {"labels": labels, "text": text, "sha256": shown["sha256"], "shown_time_s": shown["note_time_s"]}
    return json.dumps(sent).encode()


def post(server: ViewerServer, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    names = {name.replace("_", "-"): value for name, value in {"Content_Type": "application/json", **headers}.items()}
    connection.request("POST", path, body=body, headers=names)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, data


def test_a_note_is_saved_and_shown_in_its_rollout_its_step_and_the_table(server):
    base = f"/{server.secret}/"
    path = base + NOTE_PATH
    note = make_note(server, HOSTILE.replace("\ud800", "?"), "odd")
    origin = f"http://127.0.0.1:{server.server_port}"
    status, answer = post(server, path, note, Origin=origin, Sec_Fetch_Site="same-origin")
    assert status == 200
    shown = json.loads(get(server, path.removesuffix("/note"))[2])
    assert (shown["labels"], shown["note"]) == (["odd"], HOSTILE.replace("\ud800", "?"))
    assert shown["note_refusal"] is None
    assert json.loads(answer) == {name: shown[name] for name in ("labels", "note", "note_time_s")}
    step = json.loads(get(server, f"{base}api/run/0/step/1")[2])["trajectories"]
    assert [each.get("labels") for each in step] == [None, ["odd"], None]
    table = json.loads(get(server, f"{base}api/run/0/table/label%3Dodd")[2])
    assert [(each["step"], each["index"], each["labels"]) for each in table["rows"]] == [(1, 1, ["odd"])]
    assert table["offers"]["labels"] == ["odd"]
    status, data = post(server, path, note)
    assert (status, json.loads(data)) == (409, {"error": "the note was changed meanwhile: load the rollout again"})
    status, answer = post(server, path, make_note(server, ""))
    assert (status, json.loads(answer)["note_time_s"]) == (200, None)
    assert "labels" not in json.loads(get(server, path.removesuffix("/note"))[2])


def test_a_note_stays_with_the_rollout_that_was_shown_when_its_step_is_made_anew(server, tmp_path):
    """Rollouts that sampled nothing have all in common but their lines."""
    path = f"/{server.secret}/{NOTE_PATH}"
    for time_s in (1.0, 2.0):
        failed = [make_trajectory(f"g/{n}", [], error="no key", wall_time_s=time_s) for n in range(2)]
        write_step(tmp_path, 1, failed)
        step = json.loads(get(server, f"/{server.secret}/api/run/0/step/1")[2])["trajectories"]
        assert [each.get("labels") for each in step] == [None, None]
        if time_s == 2.0:
            break
        note = make_note(server, "of the first", "odd")
        assert post(server, path, note)[0] == 200
        late = make_note(server, "too late")
    status, data = post(server, path, late)
    assert (status, json.loads(data)) == (409, {"error": "this rollout was made anew: load it again"})
    assert "note" not in json.loads(get(server, path.removesuffix("/note"))[2])
    assert json.loads(get(server, f"/{server.secret}/api/run/0/table/label%3Dodd")[2])["rows"] == []
    assert main(["export", str(tmp_path), str(tmp_path / "rows.jsonl"), "--steps", "1:2"]) == 0
    assert "of the first" not in (tmp_path / "rows.jsonl").read_text()


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"},
        {"Sec_Fetch_Site": "none"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {"Host": "evil.example"},
    ],
)
def test_another_page_writes_nothing_not_even_by_a_form(server, tmp_path, headers):
    assert post(server, f"/{server.secret}/{NOTE_PATH}", NOTE, **headers)[0] == 403
    assert post(server, f"/{server.secret[:-1]}/{NOTE_PATH}", NOTE)[0] == 403
    assert not (tmp_path / "notes.jsonl").exists()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (NOTE_PATH, b"[]", 400),
        (NOTE_PATH, b'{"labels": [",",], "text": ""}', 400),
        ("api/run/0/step/1/rollout/9/note", NOTE, 404),
        ("api/run/0/step/7/rollout/0/note", NOTE, 404),
        ("api/run/3/step/1/rollout/0/note", NOTE, 404),
        ("api/run/0/step/1/rollout/1", NOTE, 404),
        ("api/run/0/step/../rollout/1/note", NOTE, 404),
        ("viewer.css", NOTE, 404),
    ],
)
def test_what_is_no_note_of_a_rollout_is_refused(server, tmp_path, path, body, status):
    assert post(server, f"/{server.secret}/{path}", body)[0] == status
    assert not (tmp_path / "notes.jsonl").exists()


def test_a_body_that_is_too_long_is_not_read(server):
    status, data = post(server, f"/{server.secret}/{NOTE_PATH}", b"", Content_Length="65537")
    assert status == 400
    assert b"Content-Length must be 0 to 65536" in data


def test_a_folder_in_which_nothing_can_be_written_says_so(server, tmp_path):
    (tmp_path / "notes.jsonl").symlink_to(tmp_path / "elsewhere")
    status, data = post(server, f"/{server.secret}/{NOTE_PATH}", make_note(server))
    assert status == 500
    assert b"notes.jsonl cannot be written" in data
    assert not (tmp_path / "elsewhere").exists()
    assert "notes.jsonl cannot be read" in json.loads(get(server, f"/{server.secret}/api/run/0")[2])["problems"][0]


def test_a_port_in_use_is_an_error(server, tmp_path):
    with pytest.raises(InvalidInputError, match="--port must be a free port"):
        ViewerServer(open_runs([tmp_path]), port=server.server_port)
    with pytest.raises(InvalidInputError, match="--port must be a free port"):
        ViewerServer(open_runs([tmp_path]), port=80000)


def test_images_have_the_types_of_pictures_only(server, tmp_path):
    folder = next(tmp_path.rglob("rollouts")) / "images"
    folder.mkdir(exist_ok=True)
    for data, kind in ((b"\x89PNG\r\n", "image/png"), (b"<svg onload=alert(1)>", "application/octet-stream")):
        name = hashlib.sha256(data).hexdigest()
        (folder / name).write_bytes(data)
        status, headers, found = get(server, f"/{server.secret}/images/run/0/image/{name}")
        assert (status, headers["Content-Type"], found) == (200, kind, data)


def test_scripts_put_no_text_in_as_html():
    for name in ASSETS:
        text = read_asset(name).decode()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\b|new Function", text
        )
        for name_of_elements in ("http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML", "http-equiv"):
            text = text.replace(name_of_elements, "")
        assert "http" not in text


def test_an_export_has_every_object_as_ascii_and_can_be_made_again(tmp_path, capsys):
    run, page = write_run(tmp_path / "run"), tmp_path / "page"
    assert main(["view", str(run), "--export", str(page)]) == 0
    assert f"open {page / 'index.html'}" in capsys.readouterr().out
    assert b'data-source="files"' in (page / "index.html").read_bytes()
    for path in open_runs([run]).list_paths():
        script = (page / "data" / f"{path}.js").read_text("ascii")
        name, data = json.loads(
            "[" + script.removeprefix("receive(").replace("JSON.parse(", "", 1)[: -len("));\n")] + "]"
        )
        assert name == path
        assert json.loads(data)
    (run / "rollouts" / "step-00000000.rank-0.jsonl.gz").unlink()
    assert main(["view", str(run), "--export", str(page)]) == 0
    assert not (page / "data/run/0/step/0.js").exists()


@pytest.mark.parametrize("name", ["index.html", "unbroken-view.json", "data", "images"])
@pytest.mark.parametrize("is_there", [True, False])
def test_an_export_follows_no_link_to_write(tmp_path, capsys, name, is_there):
    run, page, target = write_run(tmp_path / "run"), tmp_path / "page", tmp_path / "target"
    assert main(["view", str(run), "--export", str(page)]) == 0
    if (page / name).is_dir():
        shutil.rmtree(page / name)
    (page / name).unlink(missing_ok=True)
    (page / name).symlink_to(target)
    if is_there:
        target.write_text("kept")
    capsys.readouterr()
    assert main(["view", str(run), "--export", str(page)]) == 1
    assert "--export must be" in capsys.readouterr().err
    assert target.exists() == is_there
    assert not is_there or target.read_text() == "kept"


def test_an_export_of_a_large_run_has_all_lines_and_some_rollouts_of_each_step(tmp_path, capsys):
    run, page = write_run(tmp_path / "run"), tmp_path / "page"
    assert main(["view", str(run), "--export", str(page), "--max-rollouts", "2"]) == 0
    places = sorted(str(path.relative_to(page / "data/run/0")) for path in (page / "data/run/0").rglob("*.js"))
    whole = [f"step/{step}/rollout/0{end}.js" for step in (0, 1) for end in ("", "/retokenised")]
    assert places == sorted([*whole, "step/0.js", "step/1.js", "table.js"])
    assert main(["view", str(run), "--export", str(page), "--max-rollouts", "0"]) == 1
    assert "--max-rollouts must be >= 1, got 0" in capsys.readouterr().err


def test_an_export_of_a_live_run_leaves_out_what_is_deleted_meanwhile(tmp_path):
    run = tmp_path / "run"

    class Deleting(Resources):
        def list_paths(self, **options):
            yield from super().list_paths(**options)
            yield "run/0/step/7"

    resources = Deleting([RunReader(write_run(run))])
    num_files = export_page(resources, tmp_path / "page")
    assert num_files == sum(path.is_file() for path in (tmp_path / "page").rglob("*")) - 1
    assert (tmp_path / "page/data/run/0/step/0.js").is_file()


def test_an_export_takes_the_place_of_no_other_files(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main(["view", str(run), "--export", str(run)]) == 1
    assert "--export must be a new or empty folder or an earlier export" in capsys.readouterr().err


def test_more_than_four_runs_are_refused(tmp_path, capsys):
    run = str(write_run(tmp_path))
    assert main(["view", *[run] * 5]) == 1
    assert "RUN must be 1 to 4 folders or stores, got 5" in capsys.readouterr().err
