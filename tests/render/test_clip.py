"""The files: read back by PyAV and Pillow, compared with what went in."""

import json
import os
import struct
import subprocess
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from videoattn.render import metadata
from videoattn.render.clip import Clip, write_mp4, write_poster, write_preview
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob

COLOURS = {"red": (200, 30, 30), "green": (20, 180, 60), "blue": (40, 60, 220), "white": (250, 250, 250)}


def still(colour, *, frames=12, size=(64, 96)):
    return np.broadcast_to(np.array(colour, np.uint8), (frames, *size, 3)).copy()


def moving(frames=24, size=(64, 96)):
    picture = np.zeros((frames, *size, 3), np.uint8)
    for index in range(frames):
        picture[index, 16:48, 2 * index : 2 * index + 24] = (255, 200, 0)
    return picture


def write(path, clip, *, crf=16, tags=None):
    write_mp4(path, clip, place=path, crf=crf, metadata=tags or {})
    return av.open(str(path))


RATES = [Fraction(24), Fraction(24000, 1001), Fraction(30000, 1001), Fraction(25, 2)]


@pytest.mark.parametrize("rate", RATES)
def test_frame_rates_are_exact(tmp_path, rate):
    with write(tmp_path / "clip.mp4", Clip(moving(), rate)) as container:
        video = container.streams.video[0]
        assert video.average_rate == rate
        assert video.frames == 24
        times = [frame.pts * frame.time_base for frame in container.decode(video)]
    assert times == [index / rate for index in range(24)]


def test_it_is_h264_4_2_0_in_bt709(tmp_path):
    with write(tmp_path / "clip.mp4", Clip(moving(), Fraction(24))) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (context.colorspace, context.color_primaries, context.color_trc) == (1, 1, 1)
        assert context.color_range == 1


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_survive(tmp_path, colour):
    with write(tmp_path / "clip.mp4", Clip(still(COLOURS[colour]), Fraction(24))) as container:
        frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
    assert np.abs(frame.astype(int) - COLOURS[colour]).max() <= 4


def test_the_index_comes_first(tmp_path):
    path = tmp_path / "clip.mp4"
    write(path, Clip(moving(), Fraction(24))).close()
    data, boxes, at = path.read_bytes(), [], 0
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        boxes.append(kind)
        at += length
    assert boxes.index(b"moov") < boxes.index(b"mdat")


@pytest.mark.parametrize(("channels", "rate"), [(2, 48000), (1, 24000), (2, 16000)])
def test_sound_lies_under_the_picture(tmp_path, channels, rate):
    seconds = 2
    time = np.arange(rate * seconds) / rate
    # A tone in the second half only.
    tone = np.where(time >= 1, 0.5 * np.sin(2 * np.pi * 440 * time), 0).astype(np.float32)
    audio = np.stack([tone] * channels)
    with write(tmp_path / "clip.mp4", Clip(moving(48), Fraction(24), audio, rate)) as container:
        stream = container.streams.audio[0]
        assert stream.codec_context.name == "aac"
        assert stream.rate == rate
        assert stream.codec_context.channels == channels
        decoded = np.concatenate([frame.to_ndarray() for frame in container.decode(stream)], axis=1)
    half = rate * seconds // 2
    assert np.abs(decoded[:, : half - 4096]).max() < 0.01
    assert 0.25 < np.sqrt((decoded[:, half + 4096 : 2 * half] ** 2).mean()) < 0.45


def test_sound_longer_than_the_picture_is_cut(tmp_path):
    audio = np.full((2, 48000 * 3), 0.1, np.float32)
    with write(tmp_path / "clip.mp4", Clip(moving(24), Fraction(24), audio, 48000)) as container:
        stream = container.streams.audio[0]
        assert float(stream.duration * stream.time_base) == pytest.approx(1.0, abs=0.03)


def test_lower_crf_is_better(tmp_path):
    rng = np.random.default_rng(0)
    noisy = rng.integers(0, 255, (12, 64, 96, 3), dtype=np.uint8)
    sizes = []
    for crf in (8, 30):
        write(tmp_path / f"{crf}.mp4", Clip(noisy, Fraction(24)), crf=crf).close()
        sizes.append((tmp_path / f"{crf}.mp4").stat().st_size)
    assert sizes[0] > 2 * sizes[1]


def test_two_runs_write_the_same_bytes(tmp_path):
    audio = np.random.default_rng(0).uniform(-0.3, 0.3, (2, 16000)).astype(np.float32)
    tags = {"title": "x", "comment": "y" * 5000}
    for name in "ab":
        write(tmp_path / f"{name}.mp4", Clip(moving(), Fraction(24), audio, 16000), tags=tags).close()
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_settings_come_back_from_the_file(tmp_path):
    path = tmp_path / "clip.mp4"
    job = RenderJob(prompt='ein "roter" Ball; 赤いボール\n\\ = 1 🎈', seed=2**60, frame_rate="24000/1001")
    description = metadata.describe(job, device="cpu", receipt={"video_self": {"kernel": "sdpa"}})
    write(path, Clip(moving(), Fraction(24)), tags=metadata.tags(description)).close()
    assert metadata.read(path) == json.loads(json.dumps(description))
    assert metadata.read_job(path) == job
    assert description["versions"]["torch"]


def test_a_foreign_video_is_refused(tmp_path):
    path = tmp_path / "clip.mp4"
    write(path, Clip(moving(), Fraction(24)), tags={"comment": "holiday"}).close()
    with pytest.raises(RenderError, match="carries no settings"):
        metadata.read(path)
    (tmp_path / "text.mp4").write_text("no video at all")
    with pytest.raises(RenderError, match=r"cannot read .*text\.mp4"):
        metadata.read(tmp_path / "text.mp4")
    with pytest.raises(UsageError, match="no such clip"):
        metadata.read(tmp_path / "none.mp4")


def test_poster_is_the_middle_frame(tmp_path):
    frames = moving(25)
    write_poster(tmp_path / "poster.png.part", Clip(frames, Fraction(24)), place=tmp_path / "poster.png")
    with Image.open(tmp_path / "poster.png.part") as image:
        assert image.format == "PNG"
        assert np.array_equal(np.asarray(image), frames[12])


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_preview_moves_at_the_clips_speed_and_loops(tmp_path, suffix):
    path = tmp_path / f"preview{suffix}.part"
    write_preview(path, Clip(moving(48, (64, 1024)), Fraction(24)), place=tmp_path / f"preview{suffix}")
    with Image.open(path) as image:
        assert image.size == (480, 30)
        assert image.info["loop"] == 0
        count = image.n_frames
        durations = []
        for index in range(count):
            image.seek(index)
            image.load()
            durations.append(image.info["duration"])
    assert count == 25
    assert sum(durations) == pytest.approx(2000, abs=1)


def test_a_write_that_fails_is_named(tmp_path):
    with pytest.raises(RenderError, match=r"cannot write .*clip\.mp4: no such file"):
        write(tmp_path / "missing" / "clip.mp4", Clip(moving(), Fraction(24)))


ENCODE = """
import sys
from fractions import Fraction
import numpy as np
from videoattn.render.clip import Clip, write_mp4
height, width = map(int, sys.argv[2:])
frames = np.full((33, height, width, 3), (20, 30, 90), np.uint8)
for index, frame in enumerate(frames):
    frame[8:40, index : index + 30] = (250, 200, 0)
write_mp4(sys.argv[1], Clip(frames, Fraction(24)), place=sys.argv[1], crf=16, metadata={})
"""


@pytest.mark.parametrize("size", [(64, 64), (96, 704), (128, 128)])
def test_the_same_frames_give_the_same_bytes_whatever_memory_held(tmp_path, size):
    clips = []
    for fill in ("1", "85", "170"):
        path = tmp_path / f"{fill}.mp4"
        # glibc fills every allocation with this byte, so that a read of uninitialised memory shows.
        environment = os.environ | {
            "MALLOC_PERTURB_": fill,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        subprocess.run([sys.executable, "-c", ENCODE, path, *map(str, size)], env=environment, check=True)
        clips.append(path.read_bytes())
    assert clips[0] == clips[1] == clips[2]
