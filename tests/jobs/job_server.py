"""A small server for the tests: owns a store, adds jobs if told to, runs one worker until nothing is pending.

Prints one line per event: `open`, `child PID`, `working`, `added ID`, `refused REASON`.
"""

import argparse
import resource
import sys
import time

import job_renders

from videoattn.jobs import NewJob, Store, StoreError, Worker


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--add", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--frames", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.01)
    parser.add_argument("--forever", action="store_true")
    parser.add_argument("--file-limit", type=int)
    options = parser.parse_args()
    if options.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_limit, resource.RLIM_INFINITY))

    def say(*words):
        print(*words, flush=True)

    try:
        store = Store(options.folder)
    except StoreError as error:
        say("refused", error)
        return 2
    say("open")
    store.retry_all()
    for seed in range(options.start, options.start + options.add):
        payload = {"seed": seed, "frames": options.frames, "delay": options.delay}
        (job,) = store.add(NewJob(payload))
        say("added", job)
    worker = Worker(store, job_renders.behave, min_free=0)
    worker.start()
    working, pid = False, None
    # In one read: between two, a running job that goes back into the queue would be in neither.
    while options.forever or store.open_ids():
        status = worker.status
        if status.pid != pid:
            pid = status.pid
            say("child", pid)
        if not working and status.job is not None and (progress := store.progress(status.job)):
            working = progress.phase == "denoise"
            if working:
                say("working")
        if status.state == "stopped":
            say("stopped", status.reason)
            return 1
        time.sleep(0.005)
    worker.stop()
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
