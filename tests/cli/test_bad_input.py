"""Whatever a user gets wrong: one clear line, status 2 or 1, nothing left behind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import App
from safetensors.torch import load_file, save_file

from tests.cli.command import TINY, complaint, environment, run, run_forked
from videoattn import cli

pytestmark = pytest.mark.slow


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def place(tmp_path):
    """A folder with the files that the cases name."""
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "fake.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "fake.mp4").write_text("no video")
    (tmp_path / "model.ckpt").write_bytes(b"x")
    (tmp_path / "fake.safetensors").write_bytes(b"x")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "odd" / "model_index.json").mkdir(parents=True)
    (tmp_path / "loop.mp4").symlink_to("loop.mp4")
    return tmp_path


USAGE = {
    "unknown model": (["--model", "nope"], "unknown model 'nope': give demo, an existing folder"),
    "unknown hub model": (["--model", "nobody/nothing"], "unknown model 'nobody/nothing'"),
    "missing checkpoint": (["--model", "none.safetensors"], "no such file: none.safetensors"),
    "pickled checkpoint": (["--model", "model.ckpt"], "weights must be safetensors"),
    "not a pipeline": (["--model", "."], "no model_index.json"),
    "missing image": (["--image", "none.png"], "no such image: none.png"),
    "not an image": (["--image", "text.txt"], "text.txt is no image"),
    "broken image": (["--image", "fake.png"], "fake.png is no image"),
    "illegal width": (["--width", "100"], "width 100: use 96 or 128"),
    "illegal frames": (["--num-frames", "20"], "num_frames 20: use 17 or 25"),
    "zero height": (["--height", "0"], "--height 0"),
    "negative seed": (["--seed", "-1"], "--seed -1"),
    "seed is no number": (["--seed", "many"], "--seed many"),
    "bad frame rate": (["--frame-rate", "fast"], "'fast' is no frame rate"),
    "unknown kernel": (
        ["--attention", "flash9"],
        "unknown attention kernel 'flash9': choose from auto, blackwell",
    ),
    "unknown kind": (["--attention", "picture=sdpa"], "unknown kind of attention call 'picture'"),
    "unknown arm": (["--compare", "flash9"], "unknown attention kernel 'flash9'"),
    "unknown recipe": (["--recipe", "three-stage"], "--recipe three-stage"),
    "foreign recipe": (["--recipe", "distilled"], "the distilled recipe is for LTX-2.x"),
    "foreign guidance": (["--stg-scale", "1"], "--stg-scale is a setting of LTX-2.x"),
    "unknown option": (["--widht", "128"], "--widht"),
    "option without value": (["--width"], "--width"),
    "missing lora": (["--lora", "none.safetensors"], "--lora none.safetensors: no such file"),
    "output is a folder": (["-o", "folder.mp4"], "folder.mp4: it is a folder"),
    "output below a file": (["-o", "text.txt/clip.mp4"], "cannot write text.txt/clip.mp4"),
    "output without suffix": (["-o", "clip"], "a clip's name ends in .mp4"),
    "odd preview": (["--preview", "p.avi"], "a preview's name ends in .gif or .webp"),
    "odd poster": (["--poster", "p.jpg"], "a poster's name ends in .png"),
    "same name twice": (["--timing", "clip.mp4"], "two outputs have the same name"),
    "unwritable poster": (["--poster", "text.txt/p.png"], "cannot write text.txt/p.png"),
    "unquoted prompt": (["circle", "moving"], "unexpected 'circle moving': text of several words"),
    "prompt with a dash": (["-a red ball"], 'goes in as --prompt="-a red ball"'),
    "prompt in another encoding": (["--negative-prompt", "a \udcff"], "a prompt is UTF-8 text"),
    "empty model": (["--model", ""], "unknown model ''"),
    "overlong name": (["-o", "n" * 300 + ".mp4"], "file name too long"),
    "device of another kind": (["--device", "mps"], "unknown device 'mps': give cpu, cuda or cuda:N"),
    "device without memory": (["--device", "meta"], "unknown device 'meta'"),
    "numbered cpu": (["--device", "cpu:5"], "unknown device 'cpu:5'"),
    "no such GPU": (["--device", "cuda:999"], "no device cuda:999: this machine has"),
    "clip is a folder": (["--from", "folder.mp4"], "cannot read folder.mp4: it is a folder"),
    "overlong clip": (["--from", "n" * 300 + ".mp4"], ".mp4: file name too long"),
    "clip below a file": (["--from", "text.txt/a.mp4"], "no such clip: text.txt/a.mp4"),
    "clip in a loop of links": (["--from", "loop.mp4"], "cannot read loop.mp4: too many levels of symbolic"),
    "output in a loop of links": (["-o", "loop.mp4/a.mp4"], "cannot write loop.mp4/a.mp4: "),
    "image is a folder": (["--image", "folder.mp4"], "cannot read folder.mp4: it is a folder"),
    "image is a device": (["--image", "/dev/null"], "cannot read /dev/null: it is neither a file nor"),
    "overlong image": (["--image", "n" * 300], f"cannot read {'n' * 300}: file name too long"),
    "image below a file": (["--image", "text.txt/a.png"], "no such image: text.txt/a.png"),
    "image of nobody": (["--image", "~nobody-here/a.png"], "no such image: ~nobody-here/a.png"),
    "overlong model": (["--model", "n" * 300], f"cannot read {'n' * 300}: file name too long"),
    "overlong checkpoint": (["--model", "n" * 300 + ".safetensors"], ".safetensors: file name too long"),
    "model below a file": (["--model", "text.txt/model"], "unknown model 'text.txt/model'"),
    "checkpoint below a file": (["--model", "text.txt/m.safetensors"], "no such file: text.txt/m.safe"),
    "checkpoint is a folder": (["--model", "folder.safetensors"], "folder.safetensors is no diffusers pipe"),
    "model of nobody": (["--model", "~nobody-here/m"], "unknown model '~nobody-here/m'"),
    "overlong lora": (["--lora", "n" * 300], f"--lora: cannot read {'n' * 300}: file name too long"),
    "lora below a file": (["--lora", "text.txt/l.safetensors"], "--lora text.txt/l.safetensors: no such"),
    "lora of nobody": (["--lora", "~nobody-here/a"], "--lora ~nobody-here/a: no such file or folder"),
    "overlong components": (
        ["--model", "fake.safetensors", "--components", "n" * 300],
        f"cannot read {'n' * 300}: file name too long",
    ),
    "config is a folder": (["--model", "odd"], "cannot read odd/model_index.json: it is a folder"),
    "upsampler of no use": (
        ["--upsampler", "."],
        "--upsampler belongs to the distilled recipe, and this is one",
    ),
    "components of no use": (["--components", "."], "--components belongs to a single-file checkpoint, and"),
    "components of a hub model": (
        ["--model", "nobody/nothing", "--components", "."],
        "--components belongs to a single-file checkpoint, and this model is none: leave it out",
    ),
    "components of the demo": (["--model", "demo", "--components", "."], "--components belongs to a single"),
    "revision of a folder": (
        ["--revision", "main"],
        "--revision belongs to a hub model, and this one is none",
    ),
    "revision of a file": (
        ["--model", "fake.safetensors", "--revision", "main"],
        "--revision belongs to a hub model, and this one is none: leave it out",
    ),
    "no such clip": (["--from", "none.mp4"], "no such clip: none.mp4"),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage(case, place, ltx_folder):
    arguments, message = USAGE[case]
    before = tree(place)
    defaults = ["--model", ltx_folder, *TINY, "-o", "clip.mp4"]
    given = {argument for argument in arguments if str(argument).startswith("-")}
    kept = []
    for option, value in zip(defaults[::2], defaults[1::2], strict=True):
        if option not in given:
            kept += [option, value]
    result = run_forked("render", "a red ball", *kept, *arguments, cwd=place)
    assert message in complaint(result)
    assert result.returncode == 2
    assert tree(place) == before


def test_no_prompt(place, ltx_folder):
    result = run_forked("render", "--model", ltx_folder, *TINY, cwd=place)
    assert "there is no prompt" in complaint(result)
    assert result.returncode == 2


def test_two_prompts(place, ltx_folder):
    result = run_forked("render", "a", "--prompt", "b", "--model", ltx_folder, cwd=place)
    assert "the prompt was given twice" in complaint(result)
    assert result.returncode == 2


def test_unknown_verb(place):
    result = run_forked("paint", "x", cwd=place)
    assert "paint" in complaint(result)
    assert result.returncode == 2


def test_from_a_file_that_is_no_clip(place):
    result = run_forked("render", "--from", "fake.mp4", cwd=place)
    assert "cannot read fake.mp4" in complaint(result)
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("clip", "code"),
    [
        ("none.mp4", 2),
        ("fake.mp4", 1),
        ("folder.mp4", 2),
        ("n" * 300, 2),
        ("text.txt/a.mp4", 2),
        ("loop.mp4", 2),
    ],
)
def test_show(clip, code, place):
    result = run("show", clip, cwd=place)
    assert clip in complaint(result)
    assert result.returncode == code


def test_whatever_else_cannot_be_opened_is_one_line(capsys):
    """No place is known where it happens; a path that is looked at later, or elsewhere, may be one."""
    command = App()

    @command.default
    def opens(path: Path, /) -> None:
        path.read_text()

    assert cli.guarded(command, ["n" * 300], "videoattn") == 1
    assert capsys.readouterr().err == f"videoattn: cannot open {'n' * 300}: File name too long\n"
    assert cli.guarded(command, ["."], "videoattn") == 1
    assert capsys.readouterr().err == "videoattn: cannot open .: Is a directory\n"


def test_kernel_not_available(place, ltx_folder):
    before = tree(place)
    for arguments in (["--attention", "video_text=flash3"], ["--compare", "flash4"]):
        result = run_forked(
            "render",
            "x",
            "--model",
            ltx_folder,
            *TINY,
            "-o",
            "clip.mp4",
            *arguments,
            "--device",
            "cpu",
            cwd=place,
        )
        assert "it needs an NVIDIA GPU" in complaint(result)
        assert result.returncode == 1
    assert tree(place) == before


def test_corrupt_safetensors(place, ltx_folder):
    shutil.copytree(ltx_folder, place / "model")
    path = place / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = tree(place)
    result = run_forked("render", "x", "--model", "model", *TINY, "-o", "new/clip.mp4", cwd=place)
    assert f"{path.relative_to(place)}: the safetensors file is corrupt" in complaint(result)
    assert result.returncode == 1
    assert tree(place) == before


def test_nan_weights(place, ltx_folder):
    shutil.copytree(ltx_folder, place / "model")
    path = place / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    state["proj_out.bias"][0] = float("nan")
    save_file(state, path, metadata={"format": "pt"})
    before = tree(place)
    result = run_forked("render", "x", "--model", "model", *TINY, "-o", "new/clip.mp4", cwd=place)
    assert "NaN in stage denoise, step 1 of 2: nothing was written" in complaint(result)
    assert result.returncode == 1
    assert tree(place) == before


def test_disk_full(place, ltx_folder):
    small = place / "small"
    small.mkdir()
    before = tree(place)
    arguments = ["render", "x", "--model", str(ltx_folder), *TINY, "--crf", "0", "-o", "small/clip.mp4"]
    mount = f'mount -t tmpfs -o size=32k none {small} && exec "$@" && ls -A {small}'
    result = run(*arguments, cwd=place, before=["unshare", "-rm", "sh", "-c", mount, "sh"])
    assert "cannot write small/clip.mp4: the disk is full" in complaint(result)
    assert result.returncode == 1
    assert tree(place) == before


def test_out_of_memory(place, ltx_folder):
    before = tree(place)
    size = ["--width", "64000", "--height", "64000", "--num-frames", "9", "--num-inference-steps", "2"]
    # A limit of its own, or a machine with very much memory would go on.
    limit = ["prlimit", f"--as={6 << 30}"]
    arguments = ["--model", ltx_folder, *size, "-o", "clip.mp4", "--device", "cpu"]
    result = run("render", "x", *arguments, cwd=place, before=limit)
    assert "out of memory in stage denoise: try --vae-tiling, a smaller size" in complaint(result)
    assert result.returncode == 1
    assert tree(place) == before


def test_a_full_disk_behind_standard_output(place):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "videoattn", "doctor"],
            cwd=place,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert process.stderr.splitlines() == ["videoattn: cannot write the output: No space left on device"]
    assert process.returncode == 1


def test_what_a_clip_names_and_is_gone(place, ltx_folder):
    """The clip is said to name it, and its own places hold from every folder."""
    shutil.copytree(ltx_folder, place / "models" / "ltx")
    made = run_forked("render", "x", "--model", "models/ltx", *TINY, "-o", "clip.mp4", cwd=place)
    assert made.returncode == 0, made.stderr
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    again = run_forked("render", "--from", "../clip.mp4", "-o", "again.mp4", cwd=elsewhere)
    assert again.returncode == 0, again.stderr
    assert (elsewhere / "again.mp4").read_bytes() == (place / "clip.mp4").read_bytes()
    (place / "models" / "ltx").rename(place / "models" / "moved")
    gone = run_forked("render", "--from", "../clip.mp4", "-o", "third.mp4", cwd=elsewhere)
    assert "(the model that ../clip.mp4 names; give another by --model)" in complaint(gone)
    assert gone.returncode == 2
    moved = run_forked(
        "render", "--from", "../clip.mp4", "--model", "../nope", "-o", "third.mp4", cwd=elsewhere
    )
    assert "../clip.mp4" not in complaint(moved)
