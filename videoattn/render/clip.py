"""The clip as files: mp4 by PyAV, poster and animated preview by imageio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import av.container
import av.error
import imageio.v3 as imageio
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image

from videoattn.render.errors import RenderError
from videoattn.render.files import write_failed

PREVIEW_MILLISECONDS = 80
PREVIEW_WIDTH = 480


@dataclass(frozen=True, slots=True)
class Clip:
    """RGB frames uint8 `(frames, height, width, 3)`; audio float32 `(channels, samples)` or None."""

    frames: np.ndarray
    frame_rate: Fraction
    audio: np.ndarray | None = None
    sample_rate: int | None = None

    @property
    def seconds(self) -> Fraction:
        """Length of the picture track."""
        return len(self.frames) / self.frame_rate


def write_mp4(
    path: Path,
    clip: Clip,
    *,
    place: Path,
    crf: int,
    metadata: dict[str, str],
    on_frame: Callable[[], None] = lambda: None,
) -> None:
    """Encode h264 (BT.709, 4:2:0) and AAC into an mp4 whose index comes first.

    `place` is the final name, for messages. Raises RenderError when the encoder is missing or a write fails.
    """
    try:
        with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            container.metadata.update(metadata)
            _encode(container, clip, crf, on_frame)
    except av.error.FFmpegError as error:
        if isinstance(error, OSError):
            raise write_failed(error, place) from None
        raise RenderError(f"cannot encode {place}: {error}") from None
    except OSError as error:
        raise write_failed(error, place) from None


def _encode(
    container: av.container.OutputContainer, clip: Clip, crf: int, on_frame: Callable[[], None]
) -> None:
    height, width = clip.frames.shape[1:3]
    video = container.add_stream("libx264", rate=clip.frame_rate)
    video.width, video.height, video.pix_fmt = width, height, "yuv420p"
    # x264's macroblock tree reads uninitialised memory at widths that 128 does not divide: now and then one
    # of two renders of a job would come out with other bits.
    video.options = {"crf": str(crf), "preset": "medium", "x264-params": "mbtree=0"}
    context = video.codec_context
    context.colorspace = Colorspace.ITU709
    context.color_range = ColorRange.MPEG
    context.color_primaries = ColorPrimaries.BT709
    context.color_trc = ColorTrc.BT709

    sound = None
    if clip.audio is not None:
        sound = _Sound(container, clip)
    for index, pixels in enumerate(clip.frames):
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
            format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
        )
        frame.pts, frame.time_base = index, 1 / clip.frame_rate
        container.mux(video.encode(frame))
        if sound is not None:
            sound.until((index + 1) / clip.frame_rate)
        on_frame()
    container.mux(video.encode(None))
    if sound is not None:
        sound.finish()


class _Sound:
    """The AAC track, fed in step with the picture so that the file interleaves."""

    def __init__(self, container: av.container.OutputContainer, clip: Clip) -> None:
        assert clip.audio is not None
        if clip.sample_rate is None:
            raise RenderError("cannot encode sound without a sample rate")
        # A track longer than the picture would freeze the last frame.
        length = int(clip.seconds * clip.sample_rate)
        self._samples = np.clip(clip.audio[:, :length], -1.0, 1.0).astype(np.float32)
        self._layout = "mono" if len(self._samples) == 1 else "stereo"
        self._rate = clip.sample_rate
        self._container = container
        self._stream = container.add_stream("aac", rate=self._rate, layout=self._layout)
        self._stream.bit_rate = 192_000
        self._sent = 0

    def until(self, time: Fraction) -> None:
        """Encode the samples up to `time` in seconds."""
        end = min(int(time * self._rate), self._samples.shape[1])
        if end <= self._sent:
            return
        piece = np.ascontiguousarray(self._samples[:, self._sent : end])
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=self._layout)
        frame.sample_rate, frame.pts, frame.time_base = self._rate, self._sent, Fraction(1, self._rate)
        self._container.mux(self._stream.encode(frame))
        self._sent = end

    def finish(self) -> None:
        self._container.mux(self._stream.encode(None))


def write_poster(path: Path, clip: Clip, *, place: Path) -> None:
    """Write the middle frame as PNG."""
    try:
        with open(path, "wb") as file:
            imageio.imwrite(file, clip.frames[len(clip.frames) // 2], plugin="pillow", extension=".png")
    except OSError as error:
        raise write_failed(error, place) from None


def write_preview(path: Path, clip: Clip, *, place: Path) -> None:
    """Write a looping preview, at most 480 pixels wide, 12.5 frames a second."""
    step = Fraction(PREVIEW_MILLISECONDS, 1000)
    count = max(1, int(clip.seconds / step))
    picked = [clip.frames[int(index * step * clip.frame_rate)] for index in range(count)]
    height, width = clip.frames.shape[1:3]
    if width > PREVIEW_WIDTH:
        size = (PREVIEW_WIDTH, round(height * PREVIEW_WIDTH / width))
        picked = [
            np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)) for frame in picked
        ]
    try:
        with open(path, "wb") as file:
            imageio.imwrite(
                file,
                np.stack(picked),
                plugin="pillow",
                extension=place.suffix.lower(),
                duration=PREVIEW_MILLISECONDS,
                loop=0,
            )
    except OSError as error:
        raise write_failed(error, place) from None
