"""Files of valid JSON in another shape: readers take them, or say in one line what is wrong with which."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.configs import LTX_2_3, Configs, write
from tests.wrong_shapes import outcomes
from videoattn import cli
from videoattn.batch import estimate
from videoattn.batch.plan import plan
from videoattn.jobs.rendering import identify
from videoattn.kernels import library, verify
from videoattn.render import metadata, sources
from videoattn.render.checks import check
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.expected import expected_calls
from videoattn.render.job import RenderJob
from videoattn.render.models import load as load_model
from videoattn.timing.command import timing
from videoattn.timing.log import ArmTime, CallRow, ForwardTime, StageTime, TimingLog, load
from videoattn.typed_json import fit, parse

REFUSED = (UsageError, RenderError)
JOB = RenderJob(prompt="a red ball", width=96, height=96, num_frames=9, frame_rate=24, lora=("a/b:0.5",))

LOG = TimingLog(
    "cpu",
    "1",
    "2",
    ("sdpa",),
    [
        CallRow("c", "denoise", 0, 0, 0, "video_self", 1, 2, 64, 64, 32, "bfloat16", "hopper", "none", 64,
                1.5, 2.0, None, {"sdpa": ArmTime(1.5, 1.0, 0.1, True, None, None)})
    ],
    [StageTime("c", "denoise", 1.0, 0.1)],
    [ForwardTime("c", "denoise", 0, 1.0, 2)],
)  # fmt: skip

# With more of the fields that are read.
MODEL: Configs = {
    **LTX_2_3,
    "transformer/config.json": LTX_2_3["transformer/config.json"] | {"ff_bias": True},
    "vae/config.json": {
        "patch_size": 4,
        "patch_size_t": 1,
        "spatio_temporal_scaling": [True, True, True],
        "temporal_compression_ratio": 8,
        "timestep_conditioning": False,
    },
}


def clip(path: Path, comment: str) -> None:
    """The smallest of videos, with a comment."""
    with av.open(str(path), "w", metadata_errors="surrogateescape") as container:
        container.metadata["comment"] = comment
        stream = container.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 16
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8))
        container.mux([*stream.encode(frame), *stream.encode(None)])


def test_what_a_clip_says(tmp_path, capsys):
    path = tmp_path / "a.mp4"
    receipt = {"video_self": {"kernel": "sdpa", "reasons": {"hopper": "no GPU"}}}
    more = {"image_sha256": "ab", "context_parallel": "ring:2", "fast": "blocks"}
    described = metadata.describe(JOB, device="cpu", receipt=receipt, **more)

    def read(text: str) -> None:
        clip(path, text)
        identify(path)
        metadata.read_job(path)
        cli.show(path)
        cli.show(path, json=True)
        cli._job(None, cli.DEFAULT_JOB, path)

    said = outcomes(described, read, REFUSED, "a.mp4")
    assert "the settings in" in (said[".receipt.video_self.kernel = None"] or "")
    assert said[".versions = 'text'"]
    assert said[".receipt = None"] is None
    clip(path, json.dumps(described | {"receipt": [1]}))
    assert cli.main(["render", "--from", str(path)]) == 1
    message = f"videoattn: the settings in {path} are damaged: receipt is a list: input should be an object\n"
    assert capsys.readouterr().err == message


def test_clips_that_say_something_else(tmp_path):
    path = tmp_path / "a.mp4"
    described = metadata.describe(JOB, device="cpu", receipt={})
    for change, message in (
        ({"videoattn": metadata.SCHEMA + 1}, "rendered by a newer videoattn"),
        ({"job": described["job"] | {"seed": 2**64}}, "are damaged: 18446744073709551616 is too large"),
        ({"job": described["job"] | {"stg_scale": float("nan")}}, "are damaged: NaN is no number"),
    ):
        clip(path, json.dumps(described | change))
        with pytest.raises(RenderError, match=message):
            metadata.read(path)
    clip(path, '{"job": 1, "by": "somebody"}')
    with pytest.raises(RenderError, match="carries no settings"):
        metadata.read(path)


@pytest.mark.parametrize("suffix", [".mp4", ".avi", ".mkv"])
def test_tags_in_another_encoding(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    clip(path, "caf\udce9")
    assert identify(path) is None
    with pytest.raises(RenderError, match="carries no settings"):
        metadata.read(path)


@pytest.mark.parametrize("number", range(4), ids=["run", "stage", "forward", "call"])
def test_timing_logs(number, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    lines = list(map(json.dumps, LOG.lines()))
    assert len(lines) == 4

    def read(text: str) -> None:
        path.write_text("\n".join([*lines[:number], text, *lines[number + 1 :]]))
        timing(path)
        timing(path, json=True)

    said = outcomes(json.loads(lines[number]), read, REFUSED, f"t.jsonl, line {number + 1}")
    assert all(message for what, message in said.items() if ".type" in what)
    right = json.loads(lines[number])
    for where in (right, *right.get("arms", {}).values()):
        where["another"] = 1
        path.write_text("\n".join([*lines[:number], json.dumps(right), *lines[number + 1 :]]))
        with pytest.raises(ValueError, match="another is not known here"):
            load(path)
        del where["another"]
    path.write_text("\n".join(lines))
    assert load(path) == LOG
    path.write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(ValueError, match=r"line 5: .*only the first line has the type 'run'"):
        load(path)


@pytest.fixture
def model(tmp_path):
    """A folder with a model's configs and no weights."""
    write(tmp_path / "model", MODEL)
    return tmp_path / "model"


def needs(folder: Path) -> list[estimate.Estimate]:
    """Everything that is made of a model's configs before it is loaded."""
    for cached in (sources._describe, estimate._compression, estimate._parameters):
        cached.cache_clear()
    prepared = check(RenderJob(prompt="x", model=str(folder)))
    expected_calls(prepared)
    planned: Any = SimpleNamespace(job=prepared.job, prepared=prepared)
    return estimate.estimate([planned], folder / "none", "cpu")


@pytest.mark.parametrize("name", MODEL)
def test_configs_of_a_model(name, model):
    def read(text: str) -> None:
        (model / name).write_text(text)
        needs(model)

    said = outcomes(MODEL[name], read, REFUSED, "model")
    # A shape that fits may still be another model's, or no size that it makes.
    other = ("holds", "patch_size_t above 1", "use ")
    for message in filter(None, said.values()):
        assert f"/{name}" in message or any(words in message for words in other), message
    where = next(field for field, value in MODEL[name].items() if value not in (None, "LTX2Pipeline"))
    assert f"/{name}: {where} is" in (said[f".{where} = {{}}"] or "")


def test_configs_as_others_write_them(model):
    """Numbers for truth values; what else a pipeline says of a component."""
    for name, change in (
        ("vae/config.json", {"spatio_temporal_scaling": [1, 1, 1, 0]}),
        ("model_index.json", {"transformer": [*MODEL["model_index.json"]["transformer"], {"type": "x"}]}),
    ):
        (model / name).write_text(json.dumps(MODEL[name] | change))
        needs(model)


def test_weights_with_a_wrong_header(model):
    for part in ("transformer", "vae", "text_encoder"):
        (model / part).mkdir(exist_ok=True)
        save_file({"a": np.zeros((2, 3), np.float32)}, model / part / "w.safetensors")
    (known,) = needs(model)
    assert known.memory_bytes is not None
    path = model / "vae" / "w.safetensors"
    for header in (b"[]", b"7", b"null", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"{", b'{"a": []}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert needs(model)[0].memory_bytes is None
    path.write_bytes(b"x")
    assert needs(model)[0].memory_bytes is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vae/config.json", {"block_out_channels": []}),
        ("vae/config.json", {"block_out_channels": 7}),
        ("transformer/config.json", {"in_channels": "many"}),
        ("scheduler/scheduler_config.json", []),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": {}}),
        ("text_encoder/config.json", []),
        ("text_encoder/config.json", {"d_model": "7"}),
        ("tokenizer/tokenizer.json", {"model": 7}),
        ("tokenizer/tokenizer_config.json", [1]),
    ],
    ids=str,
)
def test_configs_that_diffusers_and_transformers_cannot_take(name, content, tmp_path):
    demo = sources.find(RenderJob(model="demo")).folder
    folder = tmp_path / "model"
    shutil.copytree(demo, folder)
    before = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(before | content if isinstance(content, dict) else content))
    sources._describe.cache_clear()
    prepared = check(RenderJob(prompt="a red ball", model=str(folder), dtype="fp32"))
    with pytest.raises(REFUSED, match=r"cannot load .*model") as caught:
        load_model(prepared.source, prepared.info, prepared.job, torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_its_config(tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(sources.find(RenderJob(model="demo")).folder, folder)
    (folder / "tokenizer" / "tokenizer_config.json").unlink()
    arguments = ["render", "a red ball", "--model", str(folder), "--output", str(tmp_path / "a.mp4")]
    assert cli.main([*arguments, "--num-frames", "9", "--device", "cpu"]) == 1
    assert "the model cannot encode the prompt: " in capsys.readouterr().err


def test_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "cache_root", lambda: tmp_path)
    subject = verify.Subject("hopper", "a GPU", "580", "0123")
    verify.remember(subject, verify.Verdict(True, "fine"))
    verify._known.clear()
    right = json.loads(subject.path.read_text())

    def read(text: str) -> None:
        subject.path.write_text(text)
        verdict = verify.recall(subject)
        if verdict is None:
            raise RenderError(str(subject.path))
        assert type(verdict.passed) is type(verdict.final) is bool
        assert type(verdict.detail) is str

    said = outcomes(right, read, (RenderError,), "hopper")
    assert said[".passed = 'text'"]
    subject.path.write_text(json.dumps(right | {"other": 1}))
    assert verify.recall(subject) is None


def plan_of(path):
    """What is planned of a job file; UsageError with the first of its complaints, each of which names it."""
    try:
        return plan(path)
    except UsageError as error:
        for line in str(error).splitlines():
            assert path.name in line
        raise UsageError(str(error).splitlines()[0]) from None


@pytest.mark.parametrize(
    "text",
    [
        "- {prompt: a, name: 2026-02-30}",
        "- {prompt: a, seed: !!int x}",
        "- {prompt: a, guidance_scale: !!float x}",
        "- {prompt: a, allow_offload: !!bool x}",
        "- {prompt: a, name: !!timestamp x}",
        "- {prompt: a, image: !!binary x}",
        "- {prompt: a, seed: 0x_}",
        f"- {{prompt: a, seed: {'9' * 5000}}}",
        f"- {{prompt: a, seeds: 0x{'f' * 5000}}}",
        f"- {{prompt: a, allow_offload: 0x{'f' * 5000}}}",
        f"- {{prompt: a, name: 0x{'f' * 5000}}}",
        f"- {{prompt: a, frame_rate: 0x{'f' * 5000}}}",
        '- {prompt: "\\U00110000"}',
        '- {prompt: "\\UFFFFFFFF"}',
        "? [a]\n: 1",
        "? {a: 1}\n: 1",
        "- {[a]: 1}",
        "- {prompt: a, attention: {\"\\ud800\": sdpa}}",
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_yaml_that_means_nothing(text, tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        plan_of(path)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "change", [{"attention": {"\ud800": "sdpa"}}, {"width": 10**400}, {"num_frames": 2**62}]
)
def test_jobs_out_of_bounds(change, tmp_path):
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps({"prompt": "a"} | change))
    with pytest.raises(UsageError):
        plan_of(path)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_job_files(suffix, tmp_path):
    path = tmp_path / f"jobs{suffix}"
    job = {"prompt": ["a", "b"], "seeds": "1..2", "zip": [], "name": "n", "frame_rate": 24, "crf": 16}
    job |= {"attention": "sdpa", "image": None, "lora": [], "allow_offload": True, "guidance_scale": 1.0}
    document = [job] if suffix == ".json" else job

    def read(text: str) -> None:
        path.write_text(text)
        plan_of(path)

    outcomes(document, read, (UsageError,), path.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NaN", "NaN is no number of JSON"),
        ("[-Infinity]", "-Infinity is no number of JSON"),
        ("1e999", "1e999 is too large a number"),
        ("18446744073709551616", "18446744073709551616 is too large a number"),
        ('["\\ud800"]', "half a character"),
        (b"\xff", "bytes that are not UTF-8"),
        ("[1,\n2", "line 2: Expecting"),
    ],
)
def test_what_is_no_json(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_nested_too_deep():
    for depth in (150, 250, 5000):
        path = f'{{"videoattn": 1, "job": {"[" * depth}{"]" * depth}}}'
        with pytest.raises(ValueError, match=r"too deep|should be an object"):
            fit(metadata._Description, parse(path))


def test_what_is():
    assert parse('[18446744073709551615, -1.5, "\\ud83d\\ude00", "\\\\ud800"]') == [
        2**64 - 1,
        -1.5,
        "😀",
        "\\ud800",
    ]
