"""The verb `ui`, for the command line to mount, and what `app.py` runs."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from videoattn.jobs.errors import BadFolder, StoreError
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.places import kind_of
from videoattn.web.limits import MAX_UPLOAD


def ui(
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("clips"),
    host: str = "127.0.0.1",
    port: int = 7860,
    auth: Path | None = None,
    no_auth: Annotated[bool, Parameter(negative=())] = False,
    add_user: str | None = None,
    allow_host: tuple[str, ...] = (),
    models: tuple[Path, ...] = (),
    device: str | None = None,
    local_files_only: Annotated[bool, Parameter(negative=())] = False,
    max_upload: int = MAX_UPLOAD >> 20,
) -> int:
    """Serve the web page.

    Parameters
    ----------
    output
        The folder for clips and for the queue.
    host
        The address to bind to; one beyond this machine needs --auth FILE or --no-auth.
    port
        The port to bind to.
    auth
        A file of user names and password hashes, made by --add-user.
    no_auth
        Let everyone in who can reach the address.
    add_user
        Ask for a password, add this user to the --auth file and end.
    allow_host
        A further name by which browsers may address this server, such as that of a proxy.
    models
        A pipeline folder, or a folder of those, that the page may offer.
    device
        cpu, cuda:N or several, comma-separated; by default all GPUs, or the CPU.
    local_files_only
        Never ask the hub.
    max_upload
        The largest upload in MiB.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if add_user is not None:
        return _add_user(add_user, auth)

    from videoattn.web.guard import Accounts, is_loopback

    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: give 1 to 65535, or 0 for a free one")
    if max_upload < 1:
        raise UsageError(f"--max-upload {max_upload}: give at least 1, in MiB")
    if auth is not None and no_auth:
        raise UsageError("--auth and --no-auth exclude each other: leave one out")
    if not is_loopback(host) and auth is None and not no_auth:
        raise UsageError(
            f"--host {host} can be reached from other machines: add --auth FILE (make it with --add-user "
            "NAME --auth FILE), or --no-auth to let everyone in"
        )
    accounts = None
    if auth is not None:
        try:
            accounts = Accounts(auth.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read --auth {auth}: {getattr(error, 'strerror', None) or error}"
            ) from None
        except ValueError as error:
            raise UsageError(f"--auth {auth}: {error}; make it with --add-user NAME --auth {auth}") from None
    for folder in models:
        if kind_of(folder) != "folder":
            raise UsageError(f"--models {folder}: no such folder")

    from videoattn.web.choices import Models
    from videoattn.web.serve import Settings, serve

    settings = Settings(
        output.resolve(),
        host,
        port,
        accounts,
        allow_host,
        _devices(device),
        Models(models, local_files_only),
        max_upload << 20,
    )
    try:
        serve(settings, say=lambda line: print(line, flush=True))
    except BadFolder as error:
        raise UsageError(str(error)) from None
    except StoreError as error:
        raise RenderError(str(error)) from None
    return 0


def _add_user(name: str, auth: Path | None) -> int:
    from videoattn.web.guard import hash_password

    if auth is None:
        raise UsageError("--add-user needs --auth FILE, the file to add the user to")
    if sys.stdin.isatty():
        password = getpass.getpass(f"Password for {name}: ")
        if password != getpass.getpass("Again: "):
            raise UsageError("the passwords differ: nothing was written")
    else:
        password = sys.stdin.readline().rstrip("\n")
    if len(password) < 8:
        raise UsageError("a password needs at least 8 characters: nothing was written")
    try:
        line = hash_password(name, password)
    except ValueError as error:
        raise UsageError(f"--add-user: {error}") from None
    lines = auth.read_text(encoding="utf-8").splitlines() if auth.exists() else []
    lines = [each for each in lines if each.partition(":")[0] != name]
    partial = auth.with_name(f".{auth.name}.partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write("\n".join([*lines, line]) + "\n")
    os.replace(partial, auth)
    return 0


def _devices(text: str | None) -> tuple[str, ...]:
    if text is None:
        # Asking torch takes seconds; without a driver there is nothing to ask.
        if not Path("/dev/nvidiactl").exists():
            return ("cpu",)
        import torch

        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count())) or ("cpu",)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--device {text}: name each device once, as in cuda:0,cuda:1")
    if names == ["cpu"]:
        return ("cpu",)
    from videoattn.render.devices import pick_device

    return tuple(str(pick_device(name)) for name in names)
