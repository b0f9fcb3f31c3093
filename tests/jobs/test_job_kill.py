"""Real servers, real workers, real kills."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import job_renders
import psutil
import pytest

from videoattn.jobs import JobState, NewJob, Store, StoreBusy, StoreFull, StoreReader, Worker

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("job_server.py")


class Server:
    """A `job_server.py` process and the lines it prints."""

    def __init__(self, folder, *options):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(folder), *map(str, options)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def said(self, word):
        return [line.removeprefix(word).strip() for line in list(self.lines) if line.startswith(word)]

    def children(self):
        return [int(pid) for pid in self.said("child") if pid != "None"]

    def end(self, timeout=240):
        code = self.process.wait(timeout)
        self._reader.join()
        return code

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        return self.end()


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def check_all_done_once(folder, ids):
    with Store(folder) as store:
        assert not store.recovered
        assert store.counts() == dict.fromkeys(JobState, 0) | {JobState.DONE: len(ids)}
        published = set()
        for job in store.all():
            published.update(job.files.values())
            attempts = store.attempts(job.id)
            assert [one.outcome for one in attempts].count("done") == 1
            assert all(one.outcome in ("done", "interrupted") for one in attempts)
            expected = folder.parent / "expected.mp4"
            job_renders.write_mp4(expected, job.payload["seed"], job.payload["frames"])
            assert store.path(job).read_bytes() == expected.read_bytes()
        assert {job.id for job in store.all()} == set(ids)
        assert {path.name for path in folder.iterdir() if path.is_file()} == published
        assert list((store.state_folder / "work").iterdir()) == []


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_and_double_nothing(tmp_path, wait_for):
    folder, rng = tmp_path / "out", random.Random(61)
    added, interrupted = set(), 0
    for number in range(20):
        server = Server(folder, "--add", 4, "--start", 4 * number)
        # Opening, adding and rendering each get their share of the deaths.
        event = rng.choice(["open", "added", "working", "working", "working"])
        wait_for(lambda server=server, event=event: server.said(event))
        time.sleep(rng.uniform(0, 0.15))
        server.kill()
        added.update(int(job) for job in server.said("added"))
        wait_for(lambda server=server: all(gone(pid) for pid in server.children()))
        with StoreReader(folder) as reader:
            for job in reader.all(JobState.DONE):
                assert all((folder / name).is_file() for name in job.files.values())
            interrupted += reader.counts()[JobState.RUNNING]
    server = Server(folder)
    assert server.end() == 0
    # An `add` that was cut off before it could say so may or may not have happened; one that said so has.
    with StoreReader(folder) as reader:
        present = {job.id for job in reader.all()}
    assert added <= present
    assert len(present) - len(added) <= 20
    assert interrupted >= 3
    check_all_done_once(folder, present)


def test_a_worker_dies_with_its_server(tmp_path, wait_for):
    server = Server(tmp_path / "out", "--add", 1, "--frames", 1000, "--delay", 0.05)
    wait_for(lambda: server.said("working"))
    (pid,) = server.children()
    assert psutil.pid_exists(pid)
    server.kill()
    wait_for(lambda: gone(pid))
    with Store(tmp_path / "out") as store:
        assert len(store.recovered.interrupted) == 1
        assert [path.name for path in store.folder.iterdir()] == [".videoattn"]


def test_a_second_server_is_refused_and_takes_over_after_a_death(tmp_path, wait_for):
    folder = tmp_path / "out"
    first = Server(folder, "--add", 6, "--delay", 0.05, "--forever")
    wait_for(lambda: first.said("working"))
    second = Server(folder)
    assert second.end() == 2
    assert f"in use by process {first.process.pid}" in second.said("refused")[0]
    assert "choose another folder" in second.said("refused")[0]
    with pytest.raises(StoreBusy):
        Store(folder)
    first.kill()
    third = Server(folder)
    assert third.end() == 0
    check_all_done_once(folder, [int(job) for job in first.said("added")])


def test_a_stopped_server_cannot_hold_the_store_through_its_worker(tmp_path, wait_for):
    """A worker that is stopped but alive neither blocks the next owner nor publishes anything."""
    folder = tmp_path / "out"
    server = Server(folder, "--add", 1, "--frames", 40, "--delay", 0.02)
    wait_for(lambda: server.said("working"))
    (pid,) = server.children()
    os.kill(pid, signal.SIGSTOP)
    server.kill()
    with Store(folder) as store:
        assert len(store.recovered.interrupted) == 1
    wait_for(lambda: gone(pid))


def test_a_file_size_limit_holds_the_job_back_and_ends_with_the_limit(tmp_path, wait_for):
    folder = tmp_path / "out"
    with Store(folder) as store:
        store.add(NewJob({"do": "fill", "bytes": 3 << 20, "seed": 0}))
    limited = Server(folder, "--file-limit", 1 << 20)
    wait_for(lambda: (folder / ".videoattn").exists() and len(attempts(folder)) >= 2)
    limited.kill()
    assert [path.name for path in folder.iterdir()] == [".videoattn"]
    assert "File too large" in attempts(folder)[0].error
    free = Server(folder)
    assert free.end() == 0
    with StoreReader(folder) as reader:
        job = reader.get(1)
        assert (job.state, job.failures) == (JobState.DONE, 0)
        assert reader.path(job).stat().st_size == 3 << 20


def attempts(folder):
    with StoreReader(folder) as reader:
        return [one for one in reader.attempts(1) if one.outcome]


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 2 MiB; making one needs the right to mount."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]
    made = subprocess.run(command, capture_output=True)
    if made.returncode != 0:
        pytest.skip("mounting a tmpfs needs root; the file size limit above covers the same code")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_a_full_disk_stops_the_worker_and_emptying_it_goes_on(small_disk, wait_for):
    with Store(small_disk / "out") as store:
        ids = store.add([NewJob({"seed": seed, "frames": 4}) for seed in range(3)])
        worker = Worker(store, job_renders.behave, min_free=0)
        ballast = small_disk / "ballast"
        fill(ballast)
        worker.start()
        wait_for(lambda: worker.status.state == "paused")
        assert "full" in worker.status.reason or "No space" in worker.status.reason
        with pytest.raises(StoreFull, match="cannot write"):
            store.add([NewJob({"seed": seed, "prompt": "x" * 5000}) for seed in range(1000)])
        assert not any(path.is_file() for path in store.folder.iterdir())
        assert {store.get(job).state for job in ids} <= {JobState.PENDING, JobState.RUNNING}
        ballast.unlink()
        wait_for(lambda: all(store.get(job).state is JobState.DONE for job in ids))
        worker.stop()
        assert [store.get(job).failures for job in ids] == [0, 0, 0]


def test_opening_on_a_full_disk_is_one_clear_error(small_disk):
    fill(small_disk / "ballast")
    with pytest.raises(StoreFull, match="cannot open the job store"):
        Store(small_disk / "out")


def fill(path):
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
