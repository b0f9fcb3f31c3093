"""How the server is started, and refuses to start."""

import subprocess
import sys

import pytest

from tests.web.conftest import ROOT

pytestmark = pytest.mark.slow


def app(*arguments, **options):
    return subprocess.run(
        [sys.executable, str(ROOT / "app.py"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_beyond_loopback_it_wants_a_password_or_a_word(tmp_path, host):
    answer = app("--host", host, "--output", str(tmp_path))
    assert answer.returncode == 2
    assert "--auth FILE" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", [None, "", "ada:secret", "ada:scrypt:zz:zz"])
def test_a_bad_password_file_is_named(tmp_path, content):
    users = tmp_path / "users"
    if content is not None:
        users.write_text(content)
    answer = app("--auth", str(users), "--output", str(tmp_path / "clips"))
    assert answer.returncode == 2
    assert str(users) in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("device", ["mps", "cpu:5", "cpu,meta"])
def test_a_device_that_nothing_renders_on_is_refused(tmp_path, device):
    answer = app("--device", device, "--output", str(tmp_path / "clips"))
    assert answer.returncode == 2
    assert "unknown device" in answer.stderr
    assert "give cpu, cuda or cuda:N" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_users_are_added_with_hashes(tmp_path):
    users = tmp_path / "users"
    for name, password in (("ada", "first password"), ("bob", "another one"), ("ada", "second password")):
        assert app("--add-user", name, "--auth", str(users), input=f"{password}\n").returncode == 0
    lines = users.read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == ["bob", "ada"]
    assert "password" not in users.read_text()
    assert users.stat().st_mode & 0o077 == 0
    from videoattn.web.guard import Accounts

    accounts = Accounts(lines)
    assert accounts.accepts("ada", "second password")
    assert not accounts.accepts("ada", "first password")


def test_a_short_password_is_refused(tmp_path):
    answer = app("--add-user", "ada", "--auth", str(tmp_path / "users"), input="short\n")
    assert answer.returncode == 2
    assert not (tmp_path / "users").exists()


def test_a_second_server_on_one_folder_refuses(tmp_path, serving):
    with serving(tmp_path / "clips") as server:
        answer = app("--port", "0", "--output", str(tmp_path / "clips"))
        assert answer.returncode == 1
        assert len(answer.stderr.splitlines()) == 1
        taken = app("--port", str(server.port), "--output", str(tmp_path / "others"))
        assert taken.returncode == 2
        assert "choose another --port" in taken.stderr
        assert server.http.get("/").status_code == 200


def test_sigterm_ends_it_in_good_order(tmp_path, serving):
    with serving(tmp_path / "clips") as server:
        server.stop()
        assert server.process.returncode == 0
        assert server.said[-1].startswith("stopping; the queue goes on")
